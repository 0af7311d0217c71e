"""The command line of the check, and its runs."""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import shutil
import sys
import tempfile
from dataclasses import replace

from . import findings
from .compare import Run
from .findings import Finding
from .report import Report
from .runs import ENOUGH_STEPS, LEAVES, Job, Plan, play

_MOST_RUNS = 8
_TEXT = """Tries whether a script that trains by elastic_agent.torch.Session or Loop may run elastically. It runs the script
on this machine with 1, 2 and 3 ranks, cut into micro-batches, and with a worker that is killed, a node that leaves and
one that joins; and compares parameters and samples after each step. It names what is not safe, with the script's line
where that is known.

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
    report.begin(job.steps, _MOST_RUNS, job.limit)
    found: list[Finding] = []
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
        """Does one run after the other, until one has failed."""
        first = self._run(Plan("1 rank", 1))
        if first.last() < self._job.steps and not self._found and not self._at_limit(first):
            # The script ends after few epochs: so they are longer.
            self._job = replace(self._job, epoch_steps=self._job.steps)
            first = self._run(Plan("1 rank, longer epochs", 1))
        if self._has_failed(first):
            return self._found
        second = self._run(Plan("2 ranks, micro-batches", 2, "micro-batches"), first)
        if self._has_failed(second):
            return self._found
        third = self._run(Plan("3 ranks", 3, "pieces"), first)
        if self._has_failed(third):
            return self._found
        if findings.is_comparable(first):
            self._compare(first, second, third)
        else:
            self._add(findings.why_not_comparable(first))
        self._change(third)
        return self._found

    def _at_limit(self, run: Run) -> bool:
        return run.fact("kind") == "Loop" or not run.of("enters") or run.fact("samples", 0) < 2

    def _compare(self, first: Run, second: Run, third: Run) -> None:
        apart = findings.apart(second, first) or findings.apart(third, first)
        if apart is None:
            return
        if self._found_sum(second, first):
            return
        plan = Plan("1 rank, in the same pieces", 1, "pieces")
        alone = self._run(plan)
        depends = findings.apart(third, alone)
        if depends is None:
            if not any(not one.safe for one in self._found):
                run = second if findings.apart(second, first) else third
                self._add(findings.depends_on_cut(run, first, apart))
            return
        again = self._run(replace(plan, title="the same again"))
        if differs := findings.apart(again, alone):
            self._add(findings.not_deterministic(differs))
            return
        other = self._run(replace(plan, title="the same with other random numbers", seed=500))
        seeded = findings.apart(other, alone) is None
        self._add(findings.depends_on_ranks(third, depends, alone, seeded=seeded))

    def _found_sum(self, second: Run, first: Run) -> bool:
        if findings.compare.is_a_sum(second, first):
            self._add(findings.is_a_sum(second))
            return True
        return False

    def _change(self, third: Run) -> None:
        title = "3 ranks, a worker is killed, a node leaves, a node joins"
        changed = self._run(Plan(title, 3, "pieces", changes=True), third, leaving=LEAVES)
        waits = {one["what"] for one in changed.of("waits")}
        words = {"leave": "a node that leaves", "join": "a node that joins"}
        missing = [words[one] for one in words if one not in waits]
        if missing and not self._has_failed(changed):
            self._add(findings.too_short(changed, missing))
        wrong = any(not one.safe for one in self._found)
        if findings.is_comparable(third) and not wrong and (apart := findings.apart(changed, third)):
            self._add(findings.after_changes(apart))

    def _run(self, plan: Plan, reference: Run | None = None, leaving: str | None = None) -> Run:
        self._number += 1
        run = play(self._job, plan, self._number, lambda run: self._report.progress(self._number, run))
        before = len(self._found)
        for one in findings.of_run(run, leaving, self._job.quiesce):
            self._add(one)
        ended_well = not self._has_failed(run)
        if reference is not None and ended_well and findings.is_comparable(run):
            for one in findings.of_length(run, reference):
                self._add(one)
        self._report.ended(self._number, run, self._result(run, reference, len(self._found) - before))
        return run

    def _result(self, run: Run, reference: Run | None, new: int) -> str:
        if new:
            return f"{new} finding{'s' if new > 1 else ''}"
        if reference is None or not findings.is_comparable(run):
            return "all ranks agree" if run.ranks > 1 else "the reference"
        if apart := findings.apart(run, reference):
            return f"parameters differ from step {apart.step} on"
        equal = findings.tolerance(run, reference) == 0.0
        return f"the parameters are the same{', to the last bit' if equal else ''}, and each sample was used once"

    def _has_failed(self, run: Run) -> bool:
        """Whether a run has ended in a way that later ones would meet again."""
        return bool(run.of("error") or run.stuck or not run.of("step")) or any(
            one.what.startswith("the loss of step") or "agent ended with" in one.what for one in self._found
        )

    def _add(self, one: Finding) -> None:
        if one.what not in {other.what for other in self._found}:
            self._found.append(one)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m elastic_agent.torch.check",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] SCRIPT [ARGUMENT ...]",
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("--steps", type=int, default=ENOUGH_STEPS, help="steps of each run (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that each run may take (default: 300)")
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
