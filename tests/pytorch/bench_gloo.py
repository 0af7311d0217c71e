"""Times PyTorch's gloo all-reduce as one rank of a benchmark. Reads `gloo BYTES TURNS` from standard input, a line at a
time, and answers each with milliseconds per turn."""

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for line in sys.stdin:
    _, size, turns = line.split()
    data = torch.zeros(int(size) // 4)
    # The first sum touches fresh memory and waits for ranks that have not started yet.
    dist.all_reduce(data)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(int(turns)):
        dist.all_reduce(data)
    print((time.perf_counter() - started) * 1e3 / int(turns), flush=True)
dist.destroy_process_group()
