"""Tells the agent of an exception: what torch.distributed.elastic.multiprocessing.errors has, without PyTorch."""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"

_Result = TypeVar("_Result")


def record(function: Callable[..., _Result]) -> Callable[..., _Result | None]:
    """Decorates a script's main function: an exception that leaves it is written, with its traceback, to the file
    `TORCHELASTIC_ERROR_FILE`, and is then the job's root cause in the report of every agent. Tracebacks of fatal signals
    are switched on too.

    As with PyTorch's decorator, `sys.exit(0)` in the function returns `None`, and an exit by another code or by Ctrl-C is
    not recorded. Without an agent nothing is written."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> _Result | None:
        try:
            faulthandler.enable(all_threads=True)
        except Exception as error:  # Standard error may be closed, or no file.
            _warn(f"no tracebacks of fatal signals: {error}")
        try:
            return function(*arguments, **named)
        except SystemExit as end:
            if end.code == 0:
                return None
            raise
        except Exception as error:
            _write(error)
            raise

    return wrapper


def _write(error: Exception) -> None:
    path = os.environ.get(ERROR_FILE_ENV)
    if not path:
        return
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    report = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    try:
        with open(path, "w") as file:
            json.dump(report, file)
    except OSError as problem:
        _warn(f"the error could not be written to {ERROR_FILE_ENV}={path}: {problem}")


def _warn(text: str) -> None:
    # Never in the way of the exception itself.
    try:
        print(f"elastic_agent: {text}", file=sys.stderr)
    except (OSError, ValueError):
        pass
