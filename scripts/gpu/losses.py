"""Trains the same GPT for a few steps on the CPU, on a GPU in f32 and there in bf16, and compares the losses: losses.py
TRAINER cuda|cpu whole|small. The three run side by side."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List

from report import result, traced

STEPS = 3
# How far a loss may be from the CPU's, as a share of it.
NEAR = {"f32": 1e-4, "bf16": 1e-2}
# Seconds after which a run is given up.
SECONDS = 170


def main() -> int:
    trainer, device, size = sys.argv[1:4]
    shape = "--size gpt2 --batch 2 --context 1024" if size == "whole" else "--batch 2"
    flags = f"gpt {shape} --shards 2 --windows 2 --epochs {STEPS + 1} --snapshot-every 0"
    # Without a GPU there are two runs on CPUs, which must be equal.
    on_gpu = device != "cpu"
    ways = {
        "cpu": f"--device cpu --threads {min(os.cpu_count() or 1, 16)}",
        "f32": "--device cuda:0" if on_gpu else "--device cpu",
        **({"bf16": "--device cuda:0 --precision bf16"} if on_gpu else {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = {way: Path(folder, f"{way}.log") for way in ways}
        traces = {way: Path(folder, f"{way}.trace") for way in ways}
        began, workers, took = time.monotonic(), {}, {}
        for way, more in ways.items():
            command = [trainer, *flags.split(), *more.split(), "--trace", str(traces[way])]
            print(" ".join(command), flush=True)
            with open(logs[way], "w") as log:
                workers[way] = subprocess.Popen(command, stdout=log, stderr=log)
        losses: Dict[str, List[float]] = {way: [] for way in ways}
        while time.monotonic() - began < SECONDS and len(took) < len(ways):
            for way in ways.keys() - took.keys():
                ended, steps = workers[way].poll() is not None, traced(traces[way])
                if len(steps) >= STEPS or ended:
                    took[way] = time.monotonic() - began
                    losses[way] = [step["loss"] for step in steps[:STEPS]]
                    # It is ended after its steps: the rest takes long, and its result is not needed.
                    workers[way].kill()
            time.sleep(0.1)
        for worker in workers.values():
            worker.kill()
            worker.wait()
        for way, log in logs.items():
            print(f"---- {way}\n{log.read_text()}")
    well = True
    for way in ways:
        found, wanted = losses[way], losses["cpu"]
        whole = len(found) == STEPS == len(wanted)
        off = max((abs(a - b) / abs(b) for a, b in zip(found, wanted)), default=float("inf"))
        near = whole and (way == "cpu" or off <= NEAR[way])
        well = well and near
        figures = {"way": way, "losses": found, "seconds": round(took[way], 1) if way in took else None}
        if way != "cpu":
            figures.update({"off the CPU's by": f"{off:.2e}", "allowed": NEAR[way], "near": near})
        result(**figures)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
