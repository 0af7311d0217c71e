"""Makes a process group in the given way, `env` or `tcp`, sums over it, and leaves."""

import harness

harness.report_start()

import os
import sys

import torch
import torch.distributed as dist

if sys.argv[1] == "env":
    dist.init_process_group("gloo", init_method="env://")
else:
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=harness.RANK, world_size=harness.WORLD_SIZE)
ranks = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(ranks)
harness.trace("met", total=int(ranks), launched=dist.is_torchelastic_launched())
dist.destroy_process_group()
harness.exit_now()
