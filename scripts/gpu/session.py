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

from losses import traced
from nccl import Failed, Job, result, until

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
    job = Job("session", options, worker(options, steps, backend), warm_up=60)
    try:
        job.start_all()
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
    finally:
        job.close()


def costs(options: argparse.Namespace) -> None:
    """GPT-2's step in a session of one rank, and plainly, in turns."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import elastic_agent.torch as elastic
    from models import Gpt

    small, device = options.small, options.device
    shape = (64, 32, 2, 2, 32) if small else (50257, 1024, 12, 12, 768)
    batch, steps, turns = 4 if small else 8, 5 if small else 20, 2 if small else 3

    def model_and_optimizer():
        torch.manual_seed(1)
        model = Gpt(*shape).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, **({"fused": True} if device == "cuda" else {}))

    data = torch.randint(shape[0], (batch, shape[1]), device=device)

    def loss_of(model):
        with torch.autocast(device, dtype=torch.bfloat16):
            return model(data, data) / data.numel()

    settle, waits = torch.cuda.synchronize if device == "cuda" else lambda: None, []

    def timed(step):
        """Of steps that follow each other freely."""
        for _ in range(3):
            step()
        settle()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        settle()
        return 1e3 * (time.perf_counter() - began) / steps

    def waited(step):
        """How often so many steps wait for the GPU: it then has nothing to do while the next calls are made."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(5):
                    step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(one.message) for one in caught)

    # Batches for all steps of one epoch: neither starts a loader again.
    dataset = TensorDataset(torch.arange((steps + 10) * batch))

    def plain():
        model, optimizer = model_and_optimizer()
        batches = iter(DataLoader(dataset, batch))

        def step():
            next(batches)
            optimizer.zero_grad(set_to_none=True)
            loss_of(model).backward()
            optimizer.step()

        return timed(step)

    def in_session():
        model, optimizer = model_and_optimizer()
        sampler = elastic.ElasticBatchSampler(dataset, batch)
        with elastic.Session(model, optimizer, sampler) as session:
            batches = session.steps(DataLoader(dataset, batch_sampler=sampler))

            def step():
                next(batches)
                session.backward(loss_of(model))
                session.step()

            taken = timed(step)
            if device == "cuda":
                waits.append(waited(step))
            return taken

    times = {"plain": [], "in a session": []}
    for _ in range(turns):
        times["plain"].append(plain())
        times["in a session"].append(in_session())
    medians = {way: statistics.median(each) for way, each in times.items()}
    told = {way: f"{median:.2f} ms" for way, median in medians.items()}
    result(costs="a step", **told, ratio=round(medians["in a session"] / medians["plain"], 3))
    # The loss is read now and then.
    result(waits="for the GPU in 5 steps of a session", found=waits)
    if any(found > 1 for found in waits):
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
