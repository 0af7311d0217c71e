"""What the check prints."""

from __future__ import annotations

import sys
import time

from .compare import Run
from .findings import Finding


class Report:
    """The lines of a check, with one that moves on a terminal."""

    def __init__(self, script: str) -> None:
        self._script, self._began, self._shown = script, time.monotonic(), ""
        self._moves = sys.stdout.isatty()

    def begin(self, steps: int, runs: int, most: float) -> None:
        """What follows, and how many seconds it takes at most."""
        print(
            f"Checking {self._script} on this machine: 4 to {runs} short runs of about {steps} steps. Most of the time "
            f"your script starts. All end within {most / 60:.0f} minutes.\n",
            flush=True,
        )

    def progress(self, number: int, run: Run) -> None:
        """The run under way."""
        state = f"step {run.last()}" if run.of("step") else "starting" if not run.of("enters") else "training"
        line = f"  {number}. {run.title}: {state}, {run.seconds:.0f} s"
        if self._moves and line != self._shown:
            print(f"\r\x1b[K{line}", end="", flush=True)
            self._shown = line

    def ended(self, number: int, run: Run, result: str) -> None:
        """A run, and what it shows."""
        print("\r\x1b[K" if self._moves else "", end="")
        print(f"  {number}. {run.title}: {run.last()} steps in {run.seconds:.1f} s: {result}", flush=True)

    def answer(self, findings: list[Finding], folder: str) -> int:
        """The last lines. Returns the exit code."""
        wrong = [one for one in findings if not one.safe]
        print()
        for number, one in enumerate(wrong, 1):
            place = f"{one.where}: " if one.where else ""
            print(f"{number}. {place}{one.what}.\n   What to do: {one.advice}.\n")
        for one in findings:
            if one.safe:
                print(f"Note: {one.what}; {one.advice}.\n")
        seconds = time.monotonic() - self._began
        if wrong:
            print(f"Your script is not safe to run elastically yet ({seconds:.0f} s). Logs: {folder}")
            return 1
        print(f"Your script is safe to run elastically ({seconds:.0f} s).")
        return 0
