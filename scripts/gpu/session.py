"""Sessions of `elastic_agent.torch` that sum over NCCL, between three processes on one GPU as in nccl.py: one node
dies and comes back, and a worker is killed. Then what a session costs beside plain PyTorch: session.py AGENT WORKER
[--device cpu] [--nccl-library FILE] [--small]. WORKER is the script trains_by_nccl.py."""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Callable

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


class Timed:
    """GPT-2's step, timed in a session of one rank and in a plain loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from torch.utils.data import TensorDataset

        small, self.device = options.small, options.device
        self.shape = (64, 32, 2, 2, 32) if small else (50257, 1024, 12, 12, 768)
        self.batch, self.steps = (4, 5) if small else (8, 20)
        self.data = torch.randint(self.shape[0], (self.batch, self.shape[1]), device=self.device)
        # Batches for all steps of one epoch: neither loop starts a loader again.
        self.dataset = TensorDataset(torch.arange((self.steps + 10) * self.batch))
        self.settle = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        # How often the steps of each session waited for the GPU.
        self.waits: "list[int]" = []

    def model_and_optimizer(self):
        import torch
        from models import Gpt

        torch.manual_seed(1)
        model = Gpt(*self.shape).to(self.device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, **({"fused": True} if self.device == "cuda" else {}))

    def loss_of(self, model):
        import torch

        with torch.autocast(self.device, dtype=torch.bfloat16):
            return model(self.data, self.data) / self.data.numel()

    def time(self, step: "Callable[[], object]") -> float:
        """The milliseconds of a step, of steps that follow each other freely."""
        for _ in range(3):
            step()
        self.settle()
        began = time.perf_counter()
        for _ in range(self.steps):
            step()
        self.settle()
        return 1e3 * (time.perf_counter() - began) / self.steps

    def plain(self) -> float:
        from torch.utils.data import DataLoader

        model, optimizer = self.model_and_optimizer()
        batches = iter(DataLoader(self.dataset, self.batch))

        def step():
            next(batches)
            optimizer.zero_grad(set_to_none=True)
            self.loss_of(model).backward()
            optimizer.step()

        return self.time(step)

    def in_session(self) -> float:
        import elastic_agent.torch as elastic
        from torch.utils.data import DataLoader

        model, optimizer = self.model_and_optimizer()
        sampler = elastic.ElasticBatchSampler(self.dataset, self.batch)
        with elastic.Session(model, optimizer, sampler) as session:
            batches = session.steps(DataLoader(self.dataset, batch_sampler=sampler))

            def step():
                next(batches)
                session.backward(self.loss_of(model))
                session.step()

            taken = self.time(step)
            if self.device == "cuda":
                self.waits.append(waited(step))
            return taken


def waited(step: "Callable[[], object]") -> int:
    """How often five steps wait for the GPU, which then has nothing to do while the next calls are made."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(5):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught)


def costs(options: argparse.Namespace) -> None:
    """Times GPT-2's step in a session of one rank and in a plain loop, in turns."""
    timed, times = Timed(options), {"plain": [], "in a session": []}
    for _ in range(2 if options.small else 3):
        times["plain"].append(timed.plain())
        times["in a session"].append(timed.in_session())
    medians = {way: statistics.median(each) for way, each in times.items()}
    told = {way: f"{median:.2f} ms" for way, median in medians.items()}
    result(costs="a step", **told, ratio=round(medians["in a session"] / medians["plain"], 3))
    # The loss is read now and then.
    result(waits="for the GPU in 5 steps of a session", found=timed.waits)
    if any(found > 1 for found in timed.waits):
        raise Failed("a session's step waits for the GPU")


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
