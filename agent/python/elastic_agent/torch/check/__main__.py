"""The command line of the check, and its runs."""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import shutil
import signal
import sys
import tempfile
from dataclasses import replace

from . import compare, findings
from .compare import Run
from .findings import Finding
from .report import Report
from .runs import ENOUGH_STEPS, LEAVES, Job, Plan, play

_MOST_RUNS = 8
_TEXT = """Tries whether a script that trains by elastic_agent.torch.Session or Loop is safe to run elastically.

It runs the script on this machine with 1, 2 and 3 ranks, in micro-batches, and while a worker is killed, a node leaves
and another joins. After each step it compares parameters and samples. It says what is not safe, in which line of the
script where that is known, and what to do.

The script runs up to 8 times, each time in up to 4 processes, as it is, with these changes:
  - an epoch has 4 steps, and training ends after 12 (--steps);
  - checkpoint_dir is a temporary folder. All else that the script writes or sends, it writes and sends;
  - same_bits is on in some of the runs;
  - GPUs are hidden (--gpu shows them).

Exit codes: 0, it is safe; 1, it is not; 2, the command line is wrong."""


def main() -> int:
    """Checks a script. Returns the exit code."""
    arguments = _arguments()
    job, keep = _job(arguments)
    report = Report(" ".join(arguments.script[:1]))
    # The last run may take three times as long.
    report.begin(job.steps, _MOST_RUNS, (_MOST_RUNS + 2) * job.limit)
    found: list[Finding] = []
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # No agent outlives this.
        signal.signal(one, signal.default_int_handler)
    try:
        found = _Check(job, report).all()
        return report.answer(found, str(job.folder))
    except KeyboardInterrupt:
        return 130
    finally:
        if not keep and all(one.safe for one in found):
            shutil.rmtree(job.folder, ignore_errors=True)


class _Check:
    """The runs of one script."""

    def __init__(self, job: Job, report: Report) -> None:
        self._job, self._report, self._number = job, report, 0
        self._found: list[Finding] = []

    def all(self) -> list[Finding]:
        """Does one run after the other, until one shows what is not safe: later ones would show it, too."""
        first = self._run(Plan("1 rank", 1))
        if not self._is_unsafe() and first.last() < self._job.steps and first.fact("kind") == "Session":
            # The script has few epochs: so they are longer.
            self._job = replace(self._job, epoch_steps=self._job.steps)
            first = self._run(Plan("1 rank, longer epochs", 1))
        if self._is_unsafe():
            return self._found
        title = "2 ranks, micro-batches" if findings.is_comparable(first) else "2 ranks"
        second = self._run(Plan(title, 2, "micro-batches"), first)
        if self._is_unsafe():
            return self._found
        third = self._run(Plan("3 ranks", 3, "pieces"), first)
        if not findings.is_comparable(first):
            self._found.append(findings.why_not_comparable(first))
        elif not self._is_unsafe():
            self._compare(first, second, third)
        if not self._is_unsafe():
            self._change(third)
        return self._found

    def _compare(self, first: Run, second: Run, third: Run) -> None:
        """What the number of ranks changes, and why."""
        run = second if findings.apart(second, first) else third
        apart = findings.apart(run, first)
        if apart is None:
            return
        if compare.is_a_sum(second, first):
            self._found.append(findings.is_a_sum())
            return
        plan = Plan("1 rank, in the same pieces", 1, "pieces")
        alone = self._run(plan, third)
        depends = findings.apart(third, alone)
        if depends is None:
            self._found.append(findings.depends_on_cut(run, first, apart))
            return
        again = self._run(replace(plan, title="the same again"), alone)
        if differs := findings.apart(again, alone):
            self._found.append(findings.not_deterministic(differs))
            return
        other = self._run(replace(plan, title="the same with other random numbers", seed=500), alone)
        seeded = findings.apart(other, alone) is None
        self._found.append(findings.depends_on_ranks(third, depends, alone, seeded=seeded))

    def _change(self, third: Run) -> None:
        """What deaths, joins and leaves change."""
        title = "3 ranks; a worker is killed, a node leaves, another joins"
        changed = self._run(Plan(title, 3, "pieces", changes=True), third, leaving=LEAVES)
        if self._is_unsafe():
            return
        if findings.is_comparable(third) and (apart := findings.apart(changed, third)):
            self._found.append(findings.after_changes(apart))
        waits = {one["what"] for one in changed.of("waits")}
        missing = [what for what in ("leave", "join") if what not in waits]
        if missing:
            self._found.append(findings.too_short(changed, missing))

    def _is_unsafe(self) -> bool:
        return any(not one.safe for one in self._found)

    def _run(self, plan: Plan, reference: Run | None = None, leaving: str | None = None) -> Run:
        self._number += 1
        run = play(self._job, plan, self._number, lambda run: self._report.progress(self._number, run))
        new = list(findings.of_run(run, leaving, self._job.quiesce))
        compares = reference is not None and findings.is_comparable(run)
        if compares and not new:
            new = list(findings.of_length(run, reference))
        self._found += new
        if new:
            result = f"{len(new)} finding{'s' if len(new) > 1 else ''}"
        elif compares:
            result = findings.result(run, reference)
        else:
            result = "all ranks agree" if run.ranks > 1 else "the reference"
        self._report.ended(self._number, run, result)
        return run


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m elastic_agent.torch.check",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] SCRIPT [ARGUMENT ...]",
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("--steps", type=int, default=ENOUGH_STEPS, help="steps of each run (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds that a run may take; the last, three times (default: 300)"
    )
    parser.add_argument(
        "--quiesce-timeout",
        type=float,
        default=15,
        help="that of your jobs: the seconds that may pass between two steps (default: 15)",
    )
    parser.add_argument("--gpu", action="store_true", help="let the script see this machine's GPUs")
    parser.add_argument("--logs", metavar="FOLDER", help="keep the logs in this new folder; else only if it is not safe")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]", help="what you train with")
    arguments = parser.parse_args()
    if not arguments.script:
        parser.error("name the script to check")
    if arguments.steps < ENOUGH_STEPS:
        parser.error(f"--steps is {ENOUGH_STEPS} or more: a death, a leave and a join need so many")
    return arguments


def _job(arguments: argparse.Namespace) -> tuple[Job, bool]:
    script, *rest = arguments.script
    if arguments.module:
        sys.path.insert(0, "")
        found = importlib.util.find_spec(script)
        path = pathlib.Path(found.origin) if found and found.origin else None
    else:
        path = pathlib.Path(script)
    if path is None or not path.is_file():
        sys.stderr.write(f"there is no script {script}\n")
        sys.exit(2)
    folder = pathlib.Path(arguments.logs or tempfile.mkdtemp(prefix="elastic-check-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        sys.stderr.write(f"the folder {folder} is not empty: name a new one\n")
        sys.exit(2)
    command = ["-m", script, *rest] if arguments.module else [str(path.resolve()), *rest]
    job = Job(
        command=command,
        script=path.resolve(),
        folder=folder,
        steps=arguments.steps,
        epoch_steps=4,
        limit=arguments.timeout,
        quiesce=arguments.quiesce_timeout,
        gpu=arguments.gpu,
    )
    return job, arguments.logs is not None


sys.exit(main())
