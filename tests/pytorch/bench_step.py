"""Times PyTorch's training step: forward, backward, fused AdamW. Reads `STEPS` from standard input, a line at a time, and
answers each with milliseconds a step: bench_step.py THREADS mlp BATCH SIZE... | gpt BATCH TIME SIZE..."""

import sys
import time

import torch

from models import Gpt, Mlp

threads, kind, batch, *rest = sys.argv[1:]
torch.set_num_threads(int(threads))
torch.manual_seed(0)
batch, rest = int(batch), [int(word) for word in rest]
if kind == "mlp":
    model = Mlp(*rest)
    data = torch.rand(batch, rest[0]), torch.randint(rest[-1], (batch,))
else:
    span, *size = rest
    model = Gpt(*size)
    data = torch.randint(size[0], (batch, span)), torch.randint(size[0], (batch, span))
samples = data[1].numel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)


def step():
    optimizer.zero_grad(set_to_none=True)
    (model(*data) / samples).backward()
    optimizer.step()


for _ in range(5):
    step()
for line in sys.stdin:
    started = time.perf_counter()
    for _ in range(int(line)):
        step()
    print((time.perf_counter() - started) * 1e3 / int(line), flush=True)
