"""Runs the checked script in a worker, and notes how it ends."""

from __future__ import annotations

import faulthandler
import os
import pathlib
import runpy
import sys
import traceback

from . import probe


def main() -> None:
    """`python -m elastic_agent.torch.check.worker [-m] SCRIPT [ARGUMENT…]`, in an environment with the settings."""
    settings = probe.Settings.of_environment()
    is_module = sys.argv[1] == "-m"
    script, *arguments = sys.argv[2 if is_module else 1 :]
    stacks = pathlib.Path(settings.folder, f"stacks-{settings.node}").open("w")
    faulthandler.enable(stacks)
    # Also the end of a worker whose check is gone.
    faulthandler.dump_traceback_later(settings.limit, exit=True, file=stacks)
    notes = probe.install(settings)
    notes.tell("starts")
    sys.argv = [script, *arguments]
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = settings.base
            runpy.run_path(script, run_name="__main__")
    except probe.Finished:
        pass
    except SystemExit as end:
        if isinstance(end.code, str):
            _tell_error(notes, end.code, end)
        if end.code not in (None, 0):
            raise
    except BaseException as error:
        _tell_error(notes, f"{type(error).__name__}: {error}", error)
        raise
    notes.tell("ends")


def _tell_error(notes: probe.Notes, message: str, error: BaseException) -> None:
    """Notes an error, and the line of the script that raised it."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if notes.is_own(os.path.realpath(one.filename))]
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{os.path.basename(error.filename)}:{error.lineno}"
    notes.tell("error", message=message, where=where)


main()
