"""Times the trainer's steps beside PyTorch's, eager and compiled, in turns in one run: bench_gpu.py TRAINER, which is the
program elastic-trainer. It starts that for each turn, and reads its trace.

With --device cpu and small sizes it shows that it works, and nothing of a GPU."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from models import Gpt, Mlp

TURNS = 3
# Given up after, for one turn.
SECONDS = 600
# Steps that are not counted: rooms are made, graphs captured, kernels compiled.
FIRST = 5

parser = argparse.ArgumentParser()
parser.add_argument("trainer")
parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
arguments = parser.parse_args()
device, on_gpu = arguments.device, arguments.device == "cuda"
if on_gpu and not torch.cuda.is_available():
    why = f"{sys.executable}: PyTorch {torch.__version__} finds no GPU"
    sys.exit(f"{why}; name a Python whose torch does in ELASTIC_TORCH_PYTHON")


def ours(flags, units, steps):
    """Units a second of `elastic-trainer FLAGS`, over `steps` steps after the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        trace, log = Path(folder, "trace"), Path(folder, "log")
        command = [arguments.trainer, *flags.split(), "--device", "cuda:0" if on_gpu else "cpu"]
        command += ["--snapshot-every", "0", "--trace", trace]
        with open(log, "w") as output:
            worker = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            until = time.monotonic() + SECONDS
            while True:
                ended = worker.poll() is not None
                lines = trace.read_text().split("\n")[:-1] if trace.exists() else []
                done = [line["time_ms"] for line in map(json.loads, lines) if line["event"] == "step"]
                if len(done) >= FIRST + steps:
                    return units * steps * 1e3 / max(done[FIRST + steps - 1] - done[FIRST - 1], 1)
                if ended or time.monotonic() > until:
                    said, command = log.read_text()[-2000:], " ".join(map(str, command))
                    sys.exit(f"{command} did {len(done)} of {FIRST + steps} steps:\n{said}")
                time.sleep(0.1)
        finally:
            # What it would do after its steps is not timed.
            worker.kill()
            worker.wait()


class Theirs:
    """A model's step in PyTorch, with fused AdamW."""

    def __init__(self, model, data, bf16, compiled):
        self.model = model.to(device)
        self.run = torch.compile(self.model) if compiled else self.model
        self.data, self.bf16 = [part.to(device) for part in data], bf16
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.bf16):
            loss = self.run(*self.data)
        (loss / self.data[1].numel()).backward()
        self.optimizer.step()

    def rate(self, units, steps):
        for _ in range(FIRST):
            self.step()
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        if on_gpu:
            torch.cuda.synchronize()
        return units * steps / (time.perf_counter() - began)


def compare(name, unit, flags, units, steps, bf16, model, data):
    rates = {"here": [], "eager": [], "compiled": []}
    print(f"{name}: {unit} a second, median (min–max) of {TURNS} turns", flush=True)
    for _ in range(TURNS):
        rates["here"].append(ours(flags, units, steps))
        for way in ["eager", "compiled"]:
            torch.manual_seed(0)
            try:
                theirs = Theirs(model(), data(), bf16, way == "compiled")
                rates[way].append(theirs.rate(units, steps))
            except Exception as error:
                print(f"  PyTorch, {way}, is not possible: {str(error).splitlines()[0]}", file=sys.stderr)
            theirs = None
            if on_gpu:
                torch.cuda.empty_cache()
    here = statistics.median(rates["here"])
    for way, all in rates.items():
        if all:
            median = statistics.median(all)
            beside = "" if way == "here" else f"   here is {here / median:.2f} times that"
            print(f"  {way:9} {median:14,.0f} ({min(all):,.0f}–{max(all):,.0f}){beside}", flush=True)


def mlp(samples, steps, shards):
    epochs = (FIRST + steps) * samples // 1437 + 2
    flags = f"digits --epochs {epochs} --batch {samples} --shards {shards} --hidden 128"
    data = lambda: (torch.rand(samples, 64), torch.randint(10, (samples,)))
    name = f"digits, f32, batch {samples} in {shards} shards"
    compare(name, "samples", flags, samples, steps, False, lambda: Mlp(64, 128, 10), data)


def gpt(windows, shards, steps, bf16, size):
    vocabulary, context, layers, heads, width = size
    flags = f"gpt --vocabulary {vocabulary} --context {context} --layers {layers} --heads {heads} --width {width}"
    flags += f" --batch {windows} --shards {shards} --windows {windows} --epochs {FIRST + steps + 1}"
    flags += " --precision bf16" if bf16 else ""
    data = lambda: tuple(torch.randint(vocabulary, (windows, context)) for _ in range(2))
    numbers = "bf16" if bf16 else "f32"
    name = f"GPT of {layers} layers, width {width}, {numbers}, {windows} windows of {context} in {shards} shards"
    compare(name, "tokens", flags, windows * context, steps, bf16, lambda: Gpt(*size), data)


where = torch.cuda.get_device_name() if on_gpu else "the CPU, which says nothing of a GPU"
print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, on {where}", flush=True)
if on_gpu:
    mlp(64, 400, 1)
    mlp(64, 400, 8)
    gpt(32, 4, 20, True, (50257, 1024, 12, 12, 768))
    gpt(32, 4, 20, False, (50257, 1024, 12, 12, 768))
else:
    mlp(64, 50, 8)
    gpt(8, 4, 5, False, (64, 32, 2, 2, 32))
