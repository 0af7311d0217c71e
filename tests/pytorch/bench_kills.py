"""Kills replicas of a training, by one means after the other, on this machine: a Session of elastic_agent.torch, torchft,
and DistributedDataParallel that elastic-agent or torchrun starts again. The model, the batches and the kills are the same.

    .torchft/bin/python tests/pytorch/bench_kills.py [MEANS ...] [--replicas 4] [--every 15 60] [--kills 4]

`make bench-torchft` builds what it needs. AGENT names elastic-agent, and etcd must be on the PATH. What is printed of
each means:

- undisturbed: steps a second, and samples;
- next step: the time from a kill until a group without the killed one has done a step;
- two steps: until the group has done two further steps, whatever was done before;
- joins: of a session's new workers, from when they have their imports until their first step;
- whole again: the time until all replicas train, and the longest pause between two steps before that;
- kills every so many seconds: samples in committed steps, as a share of what is done undisturbed.
"""

import argparse
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

LIMIT = 120
HERE = pathlib.Path(__file__).parent
WORKER = str(HERE / "bench_kills_worker.py")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("means", nargs="*", help="session, agents, torchft, restarts, torchrun [default: each]")
parser.add_argument("--replicas", type=int, default=4, help="[default: 4]")
parser.add_argument("--every", type=float, nargs="+", default=[15], help="seconds from kill to kill [default: 15]")
parser.add_argument("--kills", type=int, default=4, help="[default: 4]")
parser.add_argument("--sleep", default="0.05", help="seconds that a replica sleeps in a step [default: 0.05]")
parser.add_argument("--width", default="1024", help="of the network, 2.6 million parameters at 1024 [default: 1024]")
parser.add_argument("--trials", type=int, default=6, help="kills, each when all train again [default: 6]")
parser.add_argument("--preload", default="", help="elastic-agent's --preload, for example torch [default: none]")
arguments = parser.parse_args()
REPLICAS, TRIALS = arguments.replicas, arguments.trials

AGENT = os.environ.get("AGENT", str(HERE.parent.parent / "target/release/elastic-agent"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Contender:
    """A training of REPLICAS replicas in `folder`."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.steps_file = folder / "steps"
        self.steps_file.touch()
        self.over = False
        self.processes: dict[str, subprocess.Popen] = {}

    def start(self, name: str, command: list[str], **variables: str) -> None:
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115: the process has it
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "REPLICAS": str(REPLICAS), **variables}
        environment |= {"SECONDS": arguments.sleep, "WIDTH": arguments.width}
        environment["PYTHONPATH"] = str(HERE.parent.parent / "agent/python")
        self.processes[name] = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def keep(self, name: str, command: list[str], **variables: str) -> None:
        """Starts a process, and again when it has ended."""

        def again() -> None:
            while not self.over:
                self.start(name, command, **variables)
                self.processes[name].wait()

        threading.Thread(target=again, daemon=True).start()

    def steps(self) -> list[tuple[int, int, int, int, float]]:
        """What replicas told: step, replicas, samples, pid, when."""
        lines = self.steps_file.read_text().splitlines()
        return [(int(a), int(b), int(c), int(d), float(e)) for a, b, c, d, e in (line.split() for line in lines)]

    def victim(self, turn: int) -> int | None:
        """The process to kill: one of those that have trained. None if all of them have ended by themselves."""
        living = sorted({pid for _, _, _, pid, _ in self.steps() if pathlib.Path(f"/proc/{pid}").exists()})
        return living[turn % len(living)] if living else None

    def end(self) -> None:
        self.over = True
        # A launcher ends its workers when it is asked to end, and leaves them behind when it is killed.
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


class Session(Contender):
    """A node each, with an agent. Its worker is killed."""

    means = "session"

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        client, peer = free_port(), free_port()
        urls = [f"--{kind}-client-urls=http://127.0.0.1:{client}" for kind in ("listen", "advertise")]
        self.start("etcd", ["etcd", f"--data-dir={folder}/etcd", f"--listen-peer-urls=http://127.0.0.1:{peer}", *urls])
        for number in range(REPLICAS):
            self.keep(f"node-{number}", self.agent(number, client), XDG_RUNTIME_DIR=str(folder))

    def agent(self, number: int, port: int) -> list[str]:
        flags = f"--rdzv-backend=etcd --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=kills --nnodes=1:{REPLICAS}"
        flags += f" --node-name=node-{number} --local-addr=127.0.0.1 --max-restarts=1000 --exclude-after=0 --warm-up=60"
        flags += f" --preload={arguments.preload}" if arguments.preload else ""
        return [AGENT, *flags.split(), WORKER, self.means, str(self.steps_file)]


class Agents(Session):
    """The same; the agents are killed, and their workers end with them."""

    def victim(self, turn: int) -> int:
        return self.processes[f"node-{turn % REPLICAS}"].pid


class Restarts(Session):
    """Agents whose workers know nothing of rounds: all are stopped and started again."""

    means = "ddp"


class Torchft(Contender):
    """A process each, which is started again, and a lighthouse. Flags and timeouts as in torchft's own README."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        port = free_port()
        lighthouse = pathlib.Path(sys.executable).with_name("torchft_lighthouse")
        flags = f"--bind 127.0.0.1:{port} --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000"
        self.start("lighthouse", [str(lighthouse), *flags.split()])
        for number in range(REPLICAS):
            at = {"REPLICA": str(number), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
            self.keep(f"replica-{number}", [sys.executable, WORKER, "torchft", str(self.steps_file)], **at)


class Torchrun(Contender):
    """All workers under one launcher, which stops and starts them all."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        flags = f"--standalone --nproc-per-node={REPLICAS} --max-restarts=1000".split()
        run = [sys.executable, "-m", "torch.distributed.run", *flags, WORKER, "ddp", str(self.steps_file)]
        # Else restarted workers meet in the store of those before, and most of these runs never continue.
        self.start("torchrun", run, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def wait(what: str, done) -> float:
    """Waits until `done` says when it was done."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        if (at := done()) is not None:
            return at
        time.sleep(0.05)
    raise TimeoutError(f"not within {LIMIT} s: {what}")


def whole(contender: Contender, since: float, beyond: int = 0) -> float | None:
    """When, after `since`, as many processes as there are replicas had each told a step of all replicas, beyond one."""
    first: dict[int, float] = {}
    for step, size, _, pid, at in contender.steps():
        if at > since and size == REPLICAS and step > beyond:
            first.setdefault(pid, at)
    return sorted(first.values())[REPLICAS - 1] if len(first) >= REPLICAS else None


def further(contender: Contender, killed: float, steps: int) -> float | None:
    """When the group had done so many more steps than before a kill."""
    wanted = furthest(contender, killed) + steps
    return min((at for step, *_, at in contender.steps() if step >= wanted), default=None)


def furthest(contender: Contender, killed: float) -> int:
    """The step that the group was at before a kill."""
    return max(step for step, *_, at in contender.steps() if at <= killed)


def without_it(contender: Contender, killed: float) -> float | None:
    """When a smaller group had done a step after a kill. None if there was none."""
    return min((at for _, size, _, _, at in contender.steps() if at > killed and size < REPLICAS), default=None)


def joins(contender: Contender) -> list[float]:
    """Seconds from the end of its imports to its first step, of each worker that came later."""
    told = contender.folder / "joins"
    return [float(line) for line in told.read_text().split()][REPLICAS:] if told.exists() else []


def longest_pause(contender: Contender, begin: float, end: float) -> float:
    firsts: dict[int, float] = {}
    for step, *_, at in contender.steps():
        firsts.setdefault(step, at)
    times = sorted(at for at in firsts.values() if begin <= at <= end)
    return max((b - a for a, b in zip(times, times[1:])), default=0.0)


def samples(contender: Contender, begin: float, end: float) -> int:
    """Samples of the steps that were first done in this time."""
    firsts: dict[int, tuple[float, int]] = {}
    for step, _, used, _, at in contender.steps():
        firsts.setdefault(step, (at, used))
    return sum(used for at, used in firsts.values() if begin <= at < end)


def kill(contender: Contender, turn: int) -> float:
    pid, now = contender.victim(turn), time.monotonic()
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    return now


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} s ({min(values):.2f}-{max(values):.2f})"


def measure(name: str, contender: Contender) -> None:
    wait("all train", lambda: whole(contender, 0))
    begun = time.monotonic() + 2
    time.sleep(12)
    rate = samples(contender, begun, begun + 10) / 10
    print(f"{name}: undisturbed {rate / 32 / REPLICAS:.2f} steps of {32 * REPLICAS} samples a second", flush=True)
    soon, after, back, pauses = [], [], [], []
    for turn in range(TRIALS):
        killed = kill(contender, turn)
        again = wait("two steps more", lambda: further(contender, killed, 2))
        # Survivors may have done the next step with the killed one.
        beyond = furthest(contender, killed) + 1
        complete = wait("all train again", lambda: whole(contender, killed, beyond))
        # Growth within five seconds of the last one waits.
        time.sleep(6)
        without = without_it(contender, killed)
        soon += [] if without is None else [without - killed]
        after.append(again - killed)
        back.append(complete - killed)
        pauses.append(longest_pause(contender, min(again, complete), complete + 1))
    if soon:
        print(f"  next step after a kill {spread(soon)}, of {len(soon)} of {TRIALS} kills")
    if joined := joins(contender):
        print(f"  joins {spread(joined)}, of {len(joined)}")
    print(
        f"  two steps after a kill {spread(after)}; whole again {spread(back)}, longest pause meanwhile {spread(pauses)}"
    )
    for every in arguments.every:
        wait("all train again", lambda since=time.monotonic(): whole(contender, since))
        begun = time.monotonic()
        for turn in range(arguments.kills):
            kill(contender, turn)
            time.sleep(max(0.0, begun + every * (turn + 1) - time.monotonic()))
        seconds = every * arguments.kills
        share = samples(contender, begun, begun + seconds) / (seconds * rate)
        print(f"  a kill every {every:g} s, {arguments.kills} times: {100 * share:.0f} % of the samples", flush=True)


ALL = {"session": Session, "agents": Agents, "torchft": Torchft, "restarts": Restarts, "torchrun": Torchrun}
unknown = [name for name in arguments.means if name not in ALL]
if unknown:
    parser.error(f"there is no {', '.join(unknown)}, but {', '.join(ALL)}")
for name in arguments.means or ALL:
    with tempfile.TemporaryDirectory(prefix="elastic-kills-", ignore_cleanup_errors=True) as folder:
        contender = ALL[name](pathlib.Path(folder))
        try:
            measure(name, contender)
        except TimeoutError as error:
            print(f"  {error}", flush=True)
            for log in sorted(pathlib.Path(folder).glob("*.log")):
                print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-15:], sep="\n")
        finally:
            contender.end()
