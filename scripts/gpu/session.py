"""Sessions of `elastic_agent.torch` that sum over NCCL, between three processes on one GPU as in nccl.py: one node
dies and comes back, and a worker is killed. Then what a session costs beside plain PyTorch: session.py AGENT WORKER
[--device cpu] [--nccl-library FILE] [--small]. WORKER is the script trains_by_nccl.py."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nccl import Failed, Job, until
from report import result, traced

# Steps that are trained, with small sizes (True) and whole ones.
STEPS = {True: 300, False: 650}


def lines(path: Path) -> "list[dict]":
    return [json.loads(line) for line in path.read_text().splitlines()]


def worker(options: argparse.Namespace, steps: int, backend: str) -> "list[str]":
    flags = ["--steps", str(steps), "--device", options.device]
    return [sys.executable, options.worker, *flags, *(["--backend", backend] if backend else [])]


def end(path: Path) -> float:
    """The sum of all parameters' sizes, when all was done."""
    return next(line["sum"] for line in reversed(lines(path)) if line["event"] == "end")


def alone(options: argparse.Namespace, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        subprocess.run([*worker(options, steps, "gloo"), "--trace", str(trace)], check=True, timeout=120)
        return end(trace)


def disturbed(options: argparse.Namespace, steps: int, wanted: float) -> None:
    backend = "nccl" if options.device == "cuda" else ""
    with Job("session", options, worker(options, steps, backend), warm_up=60) as job:
        first = job.gets_on(3, 0)
        begun = time.monotonic()
        time.sleep(1)
        done = traced(job.trace)[-1]["step"] - first["step"]
        speed = round(done / (time.monotonic() - begun), 1)
        result(after="start", **{"steps a second": speed, "over NCCL": first["nccl"]})
        kept = until("a worker of a", lambda: job.worker("a"))
        job.after("SIGKILL of an agent, and so of its worker", lambda: job.agents["c"].kill(), 2)
        job.agents["c"].wait()
        job.after("its return, with its imports, beside which the others train", lambda: job.start("c"), 3)
        killed = until("a worker of b", lambda: job.worker("b"))
        job.after("SIGKILL of a worker", lambda: os.kill(killed, signal.SIGKILL), 2)
        again = traced(job.trace)[-1]
        back = job.gets_on(3, again["step"], again["round"] - 1)
        result(after="its replacement's imports", step=back["step"], **{"over NCCL": back["nccl"]})
        stays = job.worker("a") == kept
        job.wait()
        found, by_nccl = end(job.trace), all(line["nccl"] for line in traced(job.trace))
        off = abs(found - wanted) / wanted
        told = {"off one worker's by": f"{off:.1e}", "all over NCCL": by_nccl, "a survivor's process stays": stays}
        result(after="all of it", **told)
        if off > 1e-9 or not stays or (backend and not by_nccl):
            raise Failed(f"{told}")


def costs(options: argparse.Namespace) -> None:
    # Late: it imports torch.
    from costs import compare

    compare(options)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("agent")
    parser.add_argument("worker")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    # Of nccl.py's jobs: no stand-in here.
    options.nccl_library = ""
    steps, wrong = STEPS[options.small], 0
    for part in (lambda: disturbed(options, steps, alone(options, steps)), lambda: costs(options)):
        try:
            part()
        except (Failed, OSError, subprocess.SubprocessError, RuntimeError, StopIteration) as error:
            result(failed=repr(error))
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
