"""What a worker does when it is asked to leave."""

from __future__ import annotations

import enum
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from .. import worker

# The agent passes on the one that it gets. SIGTERM is the usual one, and its own.
_LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Seconds in which all processes of a group have got a signal.
_SPREAD = 1.0


class Phase(enum.Enum):
    """Where a worker is. What SIGTERM does depends on it."""

    # It has nothing of the job's yet: a signal to leave ends it.
    STARTING = enum.auto()
    # It meets the ranks of a round, or trains with them: the signal is a vote after the step.
    IN_GROUP = enum.auto()
    # It waits for the next round, in no group: the signal has it save its state and end.
    BETWEEN = enum.auto()
    # It saves its state and ends.
    LEAVING = enum.auto()


class Departure:
    """The agent's signals to leave, and what a worker does about them."""

    def __init__(self) -> None:
        self.phase, self.asked = Phase.STARTING, False
        # What a shell sees of a process that a signal ended. The agent knows that it asked for that.
        self._code = 128 + signal.SIGTERM
        self._process, self._former = os.getpid(), {}
        # Whether this waits for a batch, and whether a process that reads batches is gone.
        self._reading = self._reader_lost = False

    def begin(self) -> None:
        """Listens to the signals, if this is the main thread. Without an agent, Ctrl-C is the script's."""
        if threading.current_thread() is not threading.main_thread():
            return
        for one in _LEAVE if worker.available() else _LEAVE[:1]:
            former = signal.getsignal(one)
            if one == signal.SIGTERM or former in (signal.SIG_DFL, signal.default_int_handler):
                self._former[one] = signal.signal(one, self._ask)

    def end(self) -> None:
        """Restores the script's own handlers."""
        for one, former in self._former.items():
            if former is not None:
                signal.signal(one, former)
        self._former.clear()

    def leave(self) -> NoReturn:
        """Ends this worker as one that was asked to."""
        sys.exit(self._code)

    def reads(self, read: Callable[[], Any]) -> Any:
        """What a loader reads. None if this worker is asked to leave, and the loader's own processes have got the same
        signal."""
        self._reading = not self._reader_lost
        try:
            return read() if self._reading else None
        except (RuntimeError, OSError, EOFError):
            # PyTorch's own complaint, or that of a pipe whose other end is gone.
            if not self._asked_within(_SPREAD):
                raise
            return None
        finally:
            self._reading = False

    def _asked_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self.asked and time.monotonic() < until:
            time.sleep(0.01)
        return self.asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A DataLoader's worker has inherited this.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if not self.asked:
            self.asked, self._code = True, 128 + number
            self._former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._child_ended)
        if self.phase in (Phase.STARTING, Phase.BETWEEN):
            self.leave()

    def _child_ended(self, number: int, frame: FrameType | None) -> None:
        """PyTorch's handler raises, wherever this thread is, if a process of a DataLoader has ended by a signal. Who
        signals a process group ends these, too; that must not keep this worker from its save."""
        former = self._former[signal.SIGCHLD]
        if not callable(former):
            return
        try:
            former(number, frame)
        except RuntimeError:
            self._reader_lost = True
            if self._reading:
                raise
