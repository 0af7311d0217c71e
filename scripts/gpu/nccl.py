"""NCCL between three processes on one GPU, by real agents and trainers: init, sums, the death of one, its return, one
that is stopped, and an NCCL that refuses: nccl.py TRAINER AGENT [--device cpu] [--nccl-library FILE] [--small].

NCCL refuses two ranks of one host on one GPU, and tells hosts apart by NCCL_HOSTID. With another one for each process
and sockets between them, three of them can use one GPU. On CPUs it is the same schedule over TCP, without
NCCL's own part."""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Callable, Dict, List, Optional, Tuple

from report import result, traced

# Seconds. Every wait here is shorter, be it for a step or for an end.
DEADLINE = 45.0
# Seconds of --peer-timeout and of the agents' stop_grace, with small sizes (True) and whole ones (False).
PATIENCE = {True: 2, False: 4}
# Seconds that the disturbed run should take if nothing disturbed it. It must not end before all has happened.
LONG = {True: 3.0, False: 30.0}
NODES = ["a", "b", "c"]
TRAINING = "digits --hidden 128 --batch 200 --shards 6"
# For processes that take each other for other hosts, over the loopback device.
SOCKETS = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_DEBUG": "INFO",
}
FALLS_BACK = "gradients are summed over TCP, through the host"
# The result of a training: the checksum of its parameters, and the loss of each step.
Result = Tuple[str, Dict[int, float]]


class Failed(Exception):
    """Something that must hold does not."""


def until(what: str, look: "Callable[[], object]", seconds: float = DEADLINE):
    """Waits until `look` returns something, and returns that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.02)
    raise Failed(f"{what}: not within {seconds:.0f} s")


class Job:
    """Three agents on this machine, each with one worker. They find each other through the first one's store."""

    def __init__(
        self, name: str, options: argparse.Namespace, training: "List[str]", hosts: bool = True, warm_up: int = 0
    ):
        """training: the workers' program and its arguments, to which `--trace FILE` is added."""
        self.warm_up = warm_up
        self.folder = Path(tempfile.mkdtemp(prefix=f"nccl-{name}-"))
        self.trace, self.options, self.hosts, self.port = self.folder / "trace", options, hosts, free_port()
        self.agents: "Dict[str, subprocess.Popen[bytes]]" = {}
        self.training = [*training, "--trace", str(self.trace)]

    def start(self, node: str) -> None:
        is_host, patience = str(node == NODES[0]).lower(), PATIENCE[self.options.small]
        conf = [f"is_host={is_host}", "last_call_timeout=1", f"stop_grace={patience}"]
        flags = {
            "nnodes": "2:3",
            "nproc-per-node": "1",
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"127.0.0.1:{self.port}",
            "rdzv-conf": ",".join(conf),
            "rdzv-id": "gpu",
            "node-name": node,
            "local-addr": "127.0.0.1",
            "max-restarts": "10",
            "warm-up": str(self.warm_up),
            "log-dir": str(self.folder / f"logs-{node}"),
        }
        variables = {"KIT_NODE": self.mark(node), "XDG_RUNTIME_DIR": str(self.folder), **SOCKETS}
        variables["NCCL_DEBUG_FILE"] = str(self.folder / f"nccl-{node}-%p")
        if self.hosts:
            variables["NCCL_HOSTID"] = f"host-{node}"
        elif self.options.nccl_library:
            # The tests' stand-in for NCCL refuses only when it is configured to.
            variables["FAKE_NCCL_FAIL"] = "ncclCommInitRankConfig:5"
        command = [self.options.agent, *(f"--{name}={value}" for name, value in flags.items()), "--no-python"]
        with open(self.folder / f"agent-{node}", "a") as log:
            self.agents[node] = subprocess.Popen(
                command + self.training, stdout=log, stderr=log, env={**os.environ, **variables}
            )

    def __enter__(self) -> "Job":
        for node in NODES:
            self.start(node)
        return self

    def __exit__(self, *error: object) -> None:
        """Ends what is left, and shows what was logged."""
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
        for agent in self.agents.values():
            agent.wait()
        print(self.log())
        show_nccl(self.folder)

    def mark(self, node: str) -> str:
        return f"{self.folder.name}-{node}"

    def worker(self, node: str) -> "Optional[int]":
        """The process that trains on this node."""
        wanted = f"KIT_NODE={self.mark(node)}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                started = (entry / "cmdline").read_bytes().split(b"\0")[0]
                is_it = started == os.fsencode(self.training[0])
                if is_it and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    return int(entry.name)
            except OSError:
                pass
        return None

    def log(self) -> str:
        logs = sorted(self.folder.glob("agent-*"))
        return "".join(f"-- {path.name}\n{path.read_text(errors='replace')}" for path in logs)

    def made(self) -> "List[int]":
        """The rounds that made a communicator, from the log of node a's worker."""
        logged = (self.folder / "agent-a").read_text(errors="replace")
        return [int(number) for number in re.findall(r"NCCL's communicator is made.*?round=(\d+)", logged)]

    def gets_on(self, world_size: int, after: int, round_above: int = 0) -> dict:
        """Waits until this many workers train, some steps further on. Returns the first such step."""

        def look():
            for node, agent in self.agents.items():
                code = agent.poll()
                if code is not None and code != -signal.SIGKILL:
                    raise Failed(f"the agent of node {node} has ended with exit code {code}")
            steps = [line for line in traced(self.trace) if line["step"] > after and line["round"] > round_above]
            found = [line for line in steps if line["world_size"] == world_size]
            return found[0] if len(found) > 2 else None

        return until(f"{world_size} train, after step {after}", look)

    def after(self, what: str, do: "Callable[[], object]", world_size: int) -> None:
        """Does it, waits until so many train on, and tells how long that took."""
        before, made = traced(self.trace)[-1], len(self.made())
        began = time.time() * 1e3
        do()
        first = self.gets_on(world_size, before["step"], before["round"])
        took = f"{first['time_ms'] - began:.0f} ms"
        told = {"then train": world_size, "first step after": took, "step": first["step"]}
        result(after=what, **told, **{"NCCL in rounds": self.made()[made:]})

    def wait(self) -> None:
        """Waits until all have ended well."""
        until("all have ended", lambda: all(agent.poll() is not None for agent in self.agents.values()), 150)
        codes = {node: agent.returncode for node, agent in self.agents.items()}
        if any(codes.values()):
            raise Failed(f"agents ended with exit codes {codes}")

    def ends(self) -> "Result":
        """Waits until it has ended. Returns its result."""
        self.wait()
        return checksum(self.log()), losses(self.trace)


def show_nccl(folder: Path) -> None:
    for path in sorted(folder.glob("nccl-*")):
        said = path.read_text(errors="replace").splitlines()
        print(f"-- {path.name}, {len(said)} lines of NCCL's own\n" + "\n".join(said[:60] + ["…"] + said[-20:]))


def training(options: argparse.Namespace, over: str, epochs: int, flags: str = "") -> "List[str]":
    """The trainer as a worker of a job."""
    flags = f"{TRAINING} --epochs {epochs} --peer-timeout {PATIENCE[options.small]} {flags}"
    return [options.trainer, *flags.split(), *on(options, "cuda", over)]


def on(options: argparse.Namespace, device: str, over: str) -> "List[str]":
    """Flags for where to compute and how to sum. On CPUs sums go over TCP."""
    if options.device == "cpu":
        return ["--device", "cpu", "--collectives", "tcp"]
    library = ["--nccl-library", options.nccl_library] if options.nccl_library else []
    return ["--device", device, "--collectives", over, *library]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def losses(trace: Path) -> "Dict[int, float]":
    """The loss of each step. If a step was done again, the last one counts."""
    return {line["step"]: line["loss"] for line in traced(trace)}


def checksum(printed: str) -> str:
    """The checksum of the parameters, as rank 0 prints it at the end."""
    found = re.search(r"parameters crc32c:(\S+)", printed)
    return found.group(1) if found else "none"


def alone(options: argparse.Namespace, epochs: int) -> "Result":
    """Runs one worker without an agent. Returns its result."""
    folder = Path(tempfile.mkdtemp(prefix="nccl-alone-"))
    device = "cpu" if options.device == "cpu" else "cuda:0"
    command = [options.trainer, *TRAINING.split(), "--epochs", str(epochs), "--device", device]
    command += ["--trace", str(folder / "trace")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    print(done.stdout + done.stderr)
    if done.returncode != 0:
        raise Failed(f"one worker alone ended with exit code {done.returncode}")
    return checksum(done.stdout), losses(folder / "trace")


def by_hand(options: argparse.Namespace, wanted: "Result", epochs: int) -> None:
    """Runs three workers without agents: NCCL's init and sums, even where agents cannot run."""
    folder, port = Path(tempfile.mkdtemp(prefix="nccl-hand-")), str(free_port())
    command = [options.trainer, *TRAINING.split(), "--epochs", str(epochs), *on(options, "cuda:0", "nccl")]
    group = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **SOCKETS}
    workers, logs = [], [folder / f"worker-{rank}" for rank in range(3)]
    for rank, path in enumerate(logs):
        place = {"RANK": str(rank), "NCCL_HOSTID": f"host-{rank}", "NCCL_DEBUG_FILE": str(folder / f"nccl-{rank}")}
        trace = ["--trace", str(folder / "trace")] if rank == 0 else []
        with open(path, "w") as log:
            workers.append(
                subprocess.Popen(command + trace, stdout=log, stderr=log, env={**os.environ, **group, **place})
            )
    try:
        until("three workers have ended", lambda: all(worker.poll() is not None for worker in workers), 60)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        print("".join(f"-- {path.name}\n{path.read_text(errors='replace')}" for path in logs))
        show_nccl(folder)
    codes, found = [worker.returncode for worker in workers], checksum(logs[0].read_text())
    equal = (found, losses(folder / "trace")) == wanted
    result(**{"without agents": "three workers", "exit codes": codes, "equal to one worker's": equal})
    if any(codes) or not equal:
        raise Failed(f"they ended with exit codes {codes}, and {found}, not {wanted[0]}")


def sums(options: argparse.Namespace, wanted: "Result", epochs: int, over: str, flags: str) -> float:
    """Runs three workers of agents. Their sums must have the bits of one worker's. Returns steps a second."""
    began = time.monotonic()
    with Job("sums", options, training(options, over, epochs, flags)) as job:
        found, steps = job.ends(), traced(job.trace)
    half = steps[len(steps) // 2 :]
    rate = len(half) / max(half[-1]["time_ms"] - half[0]["time_ms"], 1) * 1e3
    equal, made = found == wanted, job.made()
    told = {"equal to one worker's": equal, "steps a second": round(rate, 1), "NCCL in rounds": made}
    result(sums=f"over {over} {flags}".strip(), **told, seconds=round(time.monotonic() - began, 1))
    if not equal or over == "nccl" and not made:
        raise Failed(f"sums over {over} are {found[0]} and not {wanted[0]}; NCCL in rounds: {made}")
    return rate


def disturbed(options: argparse.Namespace, wanted: "Result", epochs: int, over: str) -> None:
    """One node dies and comes back; then its worker is killed, and later stopped."""
    with Job("faults", options, training(options, over, epochs)) as job:
        first = job.gets_on(3, 0)
        result(after="start", step=first["step"], **{"NCCL in rounds": job.made()})
        job.after("SIGKILL of an agent, and so of its worker", lambda: job.agents["c"].kill(), 2)
        job.agents["c"].wait()
        job.after("its return", lambda: job.start("c"), 3)
        killed = until("a worker of b", lambda: job.worker("b"))
        job.after("SIGKILL of a worker, which its agent starts again", lambda: os.kill(killed, signal.SIGKILL), 3)
        stopped = until("a worker of c", lambda: job.worker("c"))
        patience = PATIENCE[options.small]
        job.after(f"SIGSTOP of a worker, with --peer-timeout {patience}", lambda: os.kill(stopped, signal.SIGSTOP), 3)
        found = job.ends()
        equal = found == wanted
        result(after="all of it", **{"equal to one worker's": equal, "steps": len(found[1]), "checksum": found[0]})
        if not equal:
            differ = [step for step in wanted[1] if found[1].get(step) != wanted[1][step]]
            raise Failed(f"the end is {found[0]}, not {wanted[0]}; losses differ from step {min(differ, default=None)}")


def refused(options: argparse.Namespace, wanted: "Result", epochs: int) -> None:
    """Without host ids of their own NCCL refuses. All workers continue over TCP, and say why."""
    with Job("refused", options, training(options, "auto", epochs), hosts=False) as job:
        found = job.ends()
        said = [line for line in job.log().splitlines() if FALLS_BACK in line]
        why = said[0].split(FALLS_BACK)[1].lstrip(": ") if said else "it did not"
        equal = found == wanted
        told = {"falls back to TCP": why, "equal to one worker's": equal, "NCCL in rounds": job.made()}
        result(without="NCCL_HOSTID", **told)
        if not equal or not said:
            raise Failed(f"equal: {equal}; {why}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("trainer")
    parser.add_argument("agent")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--nccl-library", default="")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    epochs, wrong = 5 if options.small else 20, []

    def part(name: str, do: "Callable[[], object]"):
        print(f"==== {name}", flush=True)
        try:
            return do()
        except Exception as error:
            if not isinstance(error, (Failed, OSError, subprocess.SubprocessError)):
                traceback.print_exc()
            result(failed=name, why=str(error))
            wrong.append(name)

    wanted = part("one worker alone", lambda: alone(options, epochs))
    if wanted is None:
        return 1
    part("three workers without agents", lambda: by_hand(options, wanted, epochs))
    ways = [("tcp", "")] if options.device == "cpu" else [("nccl", ""), ("nccl", "--bucket-mb 0.01"), ("tcp", "")]
    found = []
    for over, flags in ways:
        found.append((over, part(f"sums over {over}", lambda: sums(options, wanted, epochs, over, flags))))
    if options.device != "cpu":
        part("without host ids", lambda: refused(options, wanted, epochs))
    # Where NCCL does not work, the same is shown over TCP.
    over, rate = next(((over, rate) for over, rate in found if rate), ("", 0.0))
    if rate:
        longer = max(int(rate * LONG[options.small] * epochs / len(wanted[1])), 2 * epochs)
        undisturbed = part("one worker alone, for longer", lambda: alone(options, longer))
        if undisturbed:
            part(f"faults over {over}", lambda: disturbed(options, undisturbed, longer, over))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
