"""Times the trainer's steps beside PyTorch's, eager and compiled, in turns in one run: bench_gpu.py TRAINER, which is the
program elastic-trainer. It starts that for each turn, and reads its trace. What the program warned of and said last is
printed each time.

With --device cpu and small sizes it shows that it works, and nothing of a GPU."""

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from models import Gpt, Mlp

# Seconds after which one turn is given up.
SECONDS = 600
# Steps that are not counted: memory is allocated, graphs are captured, kernels compiled.
FIRST = 5
# Epochs beyond those that are timed: a run is killed in the end, and must not end before that.
BEYOND = 1000
# Lines of a worker's log that are shown, besides its warnings.
SHOWN = 4

parser = argparse.ArgumentParser()
parser.add_argument("trainer")
parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
parser.add_argument("--turns", type=int, default=3, help="of each way, one after the other")
parser.add_argument("--only", default="", help="cases, separated by commas; in this order")
parser.add_argument("--shards", type=int, help="of each case, instead of its own number")
arguments = parser.parse_args()
device, on_gpu = arguments.device, arguments.device == "cuda"
if on_gpu and not torch.cuda.is_available():
    why = f"{sys.executable}: PyTorch {torch.__version__} finds no GPU"
    sys.exit(f"{why}; name a Python whose torch does in ELASTIC_TORCH_PYTHON")


class Ended(Exception):
    """A training ended, or took too long, before it had done what was asked for."""


def events(trace):
    """The lines of a trace, that are complete."""
    lines = trace.read_text().split("\n")[:-1] if trace.exists() else []
    return [json.loads(line) for line in lines]


def run(flags, folder, enough):
    """Runs `elastic-trainer FLAGS` until `enough` of its trace gives something that is not None. Returns that."""
    trace, log = Path(folder, "trace"), Path(folder, "log")
    trace.unlink(missing_ok=True)
    command = [arguments.trainer, *flags.split(), "--device", "cuda:0" if on_gpu else "cpu"]
    command += ["--snapshot-every", "0", "--trace", str(trace)]
    with open(log, "w") as output:
        worker = subprocess.Popen(command, stdout=output, stderr=output)
    found, until = None, time.monotonic() + SECONDS
    try:
        while found is None:
            ended = worker.poll() is not None or time.monotonic() > until
            found = enough(events(trace))
            if found is None and ended:
                steps = sum(event["event"] == "step" for event in events(trace))
                raise Ended(f"{' '.join(command)} did {steps} steps:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
    finally:
        # It is ended after its steps: the rest is not timed.
        worker.kill()
        worker.wait()
    lines = log.read_text().splitlines()
    warned = [line for line in lines[:-SHOWN] if " WARN " in line]
    print("\n".join(f"    {line[:300]}" for line in warned[:10] + lines[-SHOWN:]), flush=True)
    return found


def ours(flags, epochs, units, steps, checkpoints):
    """Runs `elastic-trainer FLAGS`. Returns units a second, over `steps` steps after the first ones."""

    def rate(trace):
        done = [event["time_ms"] for event in trace if event["event"] == "step"]
        if len(done) < FIRST + steps:
            return None
        return units * steps * 1e3 / max(done[FIRST + steps - 1] - done[FIRST - 1], 1)

    flags += f" --epochs {epochs}"
    with tempfile.TemporaryDirectory() as folder:
        if checkpoints is not None:
            # It begins with the parameters that an earlier run has made. No step is saved while it is timed.
            flags += f" --checkpoint-dir {checkpoints} --checkpoint-every {1 << 40}"
        return run(flags, folder, rate)


def first_parameters(flags, checkpoints):
    """Makes a model's first parameters, which takes seconds, once: a run of one epoch leaves them in a folder. Whether
    that went well."""
    saved = lambda trace: next((event["step"] for event in trace if event["event"] == "committed"), None)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run(f"{flags} --epochs 1 --checkpoint-dir {checkpoints}", folder, saved) is not None
        except Ended as error:
            print(error, flush=True)
            return False


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


def compare(case, name, unit, flags, epochs, units, steps, bf16, model, data):
    turns, rates = arguments.turns, {"here": [], "eager": [], "compiled": []}
    print(f"{case}: {name}: {unit} a second, median (min–max) of {turns} turns", flush=True)
    torch.manual_seed(0)
    made = model()
    with tempfile.TemporaryDirectory() as checkpoints:
        kept = checkpoints if turns > 1 and first_parameters(flags, checkpoints) else None
        for _ in range(turns):
            try:
                rates["here"].append(ours(flags, epochs, units, steps, kept))
                tell(case, "here", unit, rates)
            except Ended as error:
                # PyTorch's figures are still worth knowing.
                print(error, flush=True)
            for way in ["eager", "compiled"]:
                try:
                    theirs = Theirs(copy.deepcopy(made), data(), bf16, way == "compiled")
                    rates[way].append(theirs.rate(units, steps))
                    tell(case, way, unit, rates)
                except Exception as error:
                    why = (str(error).splitlines() or [repr(error)])[0]
                    print(f"  PyTorch, {way}, is not possible: {why}", flush=True)
                theirs = None
                if on_gpu:
                    torch.cuda.empty_cache()
    for way, each in rates.items():
        if each:
            median = statistics.median(each)
            beside = ""
            if way != "here" and rates["here"]:
                beside = f"   here is {statistics.median(rates['here']) / median:.2f} times that"
            print(f"  {way:9} {median:14,.0f} ({min(each):,.0f}–{max(each):,.0f}){beside}", flush=True)
    return all(len(each) == turns for each in rates.values())


def tell(case, way, unit, rates):
    """Prints a line for programs. If this run is ended early, what was measured until then is there."""
    figures = {"case": case, "way": way, f"{unit} a second": round(rates[way][-1])}
    if way != "here" and rates["here"]:
        figures["here is"] = f"{rates['here'][-1] / rates[way][-1]:.2f} times that"
    print("result: " + json.dumps(figures), flush=True)


def mlp(case, samples, steps, shards):
    shards = arguments.shards or shards
    epochs = (FIRST + steps) * samples // 1437 + BEYOND
    flags = f"digits --batch {samples} --shards {shards} --hidden 128"
    data = lambda: (torch.rand(samples, 64), torch.randint(10, (samples,)))
    name = f"digits, f32, batch {samples} in {shards} shards"
    return compare(case, name, "samples", flags, epochs, samples, steps, False, lambda: Mlp(64, 128, 10), data)


def gpt(case, windows, shards, steps, bf16, size):
    shards = arguments.shards or shards
    vocabulary, context, layers, heads, width = size
    flags = f"gpt --vocabulary {vocabulary} --context {context} --layers {layers} --heads {heads} --width {width}"
    flags += f" --batch {windows} --shards {shards} --windows {windows}"
    flags += " --precision bf16" if bf16 else ""
    data = lambda: tuple(torch.randint(vocabulary, (windows, context)) for _ in range(2))
    numbers = "bf16" if bf16 else "f32"
    name = f"GPT of {layers} layers, width {width}, {numbers}, {windows} windows of {context} in {shards} shards"
    all_steps, tokens = FIRST + steps + BEYOND, windows * context
    return compare(case, name, "tokens", flags, all_steps, tokens, steps, bf16, lambda: Gpt(*size), data)


GPT2 = (50257, 1024, 12, 12, 768)
CASES = {
    "digits": lambda case: mlp(case, 64, 400, 1),
    "digits-8": lambda case: mlp(case, 64, 400, 8),
    "gpt-bf16": lambda case: gpt(case, 32, 4, 20, True, GPT2),
    "gpt-f32": lambda case: gpt(case, 32, 4, 20, False, GPT2),
}
SMALL_CASES = {
    "digits": lambda case: mlp(case, 64, 50, 8),
    "gpt": lambda case: gpt(case, 8, 4, 5, False, (64, 32, 2, 2, 32)),
}
cases = CASES if on_gpu else SMALL_CASES
only = [name for name in arguments.only.split(",") if name] or list(cases)
unknown = [name for name in only if name not in cases]
if unknown:
    parser.error(f"there is no case {', '.join(unknown)}, but {', '.join(cases)}")
where = torch.cuda.get_device_name() if on_gpu else "the CPU, which says nothing of a GPU"
print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, on {where}", flush=True)
# A measurement that fails does not stop the others.
whole = [cases[case](case) for case in only]
sys.exit(0 if all(whole) else 1)
