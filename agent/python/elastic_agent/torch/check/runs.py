"""Runs the script under agents on this machine, and does to them what a run is to show."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ... import program
from .compare import Note, Run
from .probe import SETTINGS_ENV, Settings

# The node whose worker is killed, the one that leaves, and the one that joins. The first serves the store.
_KILLED, LEAVES = "node-1", "node-2"
# In which step the worker dies; after which the others wait until it is back, a node has left, and another has come.
_DIES_IN, _HOLDS = 3, {"4": "return", "7": "leave", "9": "join"}
ENOUGH_STEPS = 12
# Seconds that a run may take longer than its workers.
_GRACE = 20.0


@dataclass(frozen=True)
class Job:
    """What is run, and where."""

    # What follows the worker's module on the command line.
    command: list[str]
    script: pathlib.Path
    folder: pathlib.Path
    steps: int
    epoch_steps: int
    limit: float
    quiesce: float
    gpu: bool


@dataclass(frozen=True)
class Plan:
    """One run."""

    title: str
    ranks: int
    cut: str = "given"
    changes: bool = False
    seed: int = 1


def play(job: Job, plan: Plan, number: int, show: Callable[[Run], None]) -> Run:
    """Runs the script as planned. show: called now and then with what is known so far."""
    folder = job.folder / f"run-{number}"
    (folder / "run").mkdir(parents=True, mode=0o700)
    run, began = Run(plan.title, plan.ranks), time.monotonic()
    # Workers start three times, one after the other.
    job = replace(job, limit=3 * job.limit) if plan.changes else job
    reader = _Reader(folder)
    with _Agents(job, plan, folder) as agents:
        for node in range(1, plan.ranks + 1):
            agents.start(node)
        while not agents.ended():
            for note in reader.new():
                run.notes.append(note)
                if note["event"] == "waits":
                    agents.act(note["what"])
            run.seconds = time.monotonic() - began
            if run.seconds > job.limit + _GRACE:
                break
            show(run)
            time.sleep(0.05)
        run.notes += reader.new()
        run.notes.sort(key=lambda note: note["at"])
        run.seconds = time.monotonic() - began
        run.codes = agents.codes()
    run.causes = dict(_causes(folder))
    for node, is_late, where in _stacks(folder, job):
        (run.stuck if is_late else run.crashed)[node] = where
    return run


class _Agents:
    """The agents of a run. At the end none is left."""

    def __init__(self, job: Job, plan: Plan, folder: pathlib.Path) -> None:
        self._job, self._plan, self._folder = job, plan, folder
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._acted: set[str] = set()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]

    def __enter__(self) -> _Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._agents.values():
            if one.poll() is None:
                # Its workers end with it.
                one.kill()
        for one in self._agents.values():
            one.wait()

    def start(self, number: int) -> None:
        """Starts a node's agent."""
        node, plan, job = f"node-{number}", self._plan, self._job
        nodes = f"1:{plan.ranks}" if plan.changes else str(plan.ranks)
        conf = f"is_host={str(number == 1).lower()},last_call_timeout=60s,min_round_time=0"
        conf += f",quiesce_timeout={job.quiesce:g}s"
        flags = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", f"--rdzv-conf={conf}"]
        flags += ["--rdzv-id=check", "--local-addr=127.0.0.1", f"--nnodes={nodes}", f"--node-name={node}"]
        flags += [f"--max-restarts={3 if plan.changes else 0}", f"--log-dir={self._folder}"]
        # Without it, a session refuses by name what needs a rank before it has begun.
        flags += [f"--warm-up={job.limit:g}s"] if plan.changes else []
        flags += [f"--shutdown-timeout={max(30, 2 * job.quiesce):g}"]
        settings = Settings(
            folder=str(self._folder),
            node=node,
            script=str(job.script),
            base=str(job.script.parent),
            seed=plan.seed + 1000 * number,
            limit=job.limit,
            steps=job.steps,
            epoch_steps=job.epoch_steps,
            cut=plan.cut,
            begin=str(job.folder / f"begin-{job.epoch_steps}"),
            dies_in=_DIES_IN if plan.changes and node == _KILLED else 0,
            holds=_HOLDS if plan.changes else {},
            ranks=plan.ranks,
        )
        environment = {name: text for name, text in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC_"))}
        environment |= {SETTINGS_ENV: settings.to_text(), "PYTHON_EXEC": sys.executable}
        environment |= {"XDG_RUNTIME_DIR": str(self._folder / "run"), "PYTHONUNBUFFERED": "1"}
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 3)))
        if not job.gpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [program.path(), *flags, "-m", f"{__package__}.worker", *job.command]
        with (self._folder / f"{node}.log").open("wb") as log:
            self._agents[node] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def act(self, what: str) -> None:
        """Does, once, what the workers wait for."""
        if what in self._acted:
            return
        self._acted.add(what)
        if what == "leave":
            self._agents[LEAVES].send_signal(signal.SIGTERM)
        elif what == "join":
            self.start(self._plan.ranks + 1)

    def ended(self) -> bool:
        """Whether all have ended."""
        return all(one.poll() is not None for one in self._agents.values())

    def codes(self) -> dict[str, int]:
        """The exit codes of those that have ended."""
        return {node: code for node, one in self._agents.items() if (code := one.poll()) is not None}


class _Reader:
    """The notes of all workers, each once."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder, self._read = folder, {}

    def new(self) -> list[Note]:
        """What was noted since the last call."""
        found = []
        for path in self._folder.glob("notes-*"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                # The last line may not be whole yet.
                lines = file.read().rpartition(b"\n")[0]
            self._read[path] = self._read.get(path, 0) + len(lines) + (1 if lines else 0)
            found += [json.loads(line) for line in lines.splitlines()]
        return found


def _stacks(folder: pathlib.Path, job: Job) -> Iterator[tuple[str, bool, str]]:
    """The nodes whose worker's time was over, or that a fatal signal ended: which of both, and where the script was."""
    for path in sorted(folder.glob("stacks-*")):
        text = path.read_text(errors="replace")
        is_late = text.startswith("Timeout")
        if text:
            # In a crash the other threads are anywhere.
            part = text if is_late else text.partition("Current thread")[2].partition("\n\n")[0]
            places = re.findall(r'File "([^"]+)", line (\d+)', part)
            own = [f"{pathlib.Path(name).name}:{line}" for name, line in places if pathlib.Path(name) == job.script]
            yield path.name[len("stacks-") :], is_late, own[0] if own else ""


def _causes(folder: pathlib.Path) -> Iterator[tuple[str, str]]:
    """What the agents ended with."""
    for path in sorted(folder.glob("*.log")):
        last = [line for line in path.read_text(errors="replace").splitlines() if line.startswith("elastic-agent: ")]
        if last:
            yield path.stem, last[-1].partition(": ")[2]
