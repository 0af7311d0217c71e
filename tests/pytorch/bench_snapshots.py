"""Times steps of DistributedDataParallel with a snapshot in each beside steps without: the same model, in turns.

    elastic-agent --standalone --nproc-per-node=2 tests/pytorch/bench_snapshots.py [BLOCKS]
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

import elastic_agent.torch as elastic
from models import bench_network

BLOCKS, STEPS, BATCH = int(sys.argv[1]) if len(sys.argv) > 1 else 15, 20, 32
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
# With AdamW's moments 31 MB of state.
model = bench_network()
trained = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters())
inputs, labels = torch.randn(BATCH, 512), torch.randint(1000, (BATCH,))
snapshots = elastic.Snapshots({"model": model, "optimizer": optimizer})
number, taken = 0, 0


def block(with_snapshots):
    global number, taken
    began = time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(trained(inputs), labels).backward()
        optimizer.step()
        number += 1
        if with_snapshots:
            taken += snapshots.take(number)
    snapshots.wait()
    return (time.perf_counter() - began) / STEPS * 1000


times = {"without": [], "with": []}
for turn in range(BLOCKS + 1):
    took = block(False), block(True)
    # The kernel clears the memory at its first touch.
    if turn:
        times["without"].append(took[0])
        times["with"].append(took[1])
if dist.get_rank() == 0:
    for name, all_ in times.items():
        print(f"{name} snapshots: {statistics.median(all_):.2f} ms a step ({min(all_):.2f}-{max(all_):.2f})")
    more = statistics.median(times["with"]) - statistics.median(times["without"])
    print(f"a snapshot adds {more:.2f} ms; {taken} taken", flush=True)
os._exit(0)
