"""Finds the program `elastic-agent` and becomes it."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from typing import NoReturn

NAME = "elastic-agent"


def path() -> str:
    """Where the program is: where this package's installation has put it, else on `PATH`."""
    for folder in _folders():
        found = folder / NAME
        if found.is_file() and os.access(found, os.X_OK):
            return str(found)
    on_path = shutil.which(NAME)
    if on_path is None:
        folders = ", ".join(str(folder) for folder in dict.fromkeys(_folders()))
        raise FileNotFoundError(f"the program {NAME} is neither in {folders} nor on PATH: install the package's wheel")
    return on_path


def _folders() -> Iterator[pathlib.Path]:
    yield pathlib.Path(sysconfig.get_path("scripts"))
    # pip install --user, and --target or --prefix.
    if f"{os.name}_user" in sysconfig.get_scheme_names():
        yield pathlib.Path(sysconfig.get_path("scripts", f"{os.name}_user"))
    yield pathlib.Path(__file__).resolve().parent.parent / "bin"


def become(arguments: Sequence[str], called: str = NAME) -> NoReturn:
    """Replaces this process by the program. By the name that it is called, it knows whose flags to take; workers are run
    by this Python, unless `PYTHON_EXEC` names another."""
    try:
        program = path()
    except FileNotFoundError as error:
        sys.exit(f"{called}: {error}")
    if sys.executable:
        os.environ.setdefault("PYTHON_EXEC", sys.executable)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program, [called, *arguments])
