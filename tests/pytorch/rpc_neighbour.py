"""Calls its neighbour by name, over PyTorch's RPC."""

import harness

harness.report_start()

import torch
import torch.distributed.rpc as rpc

rpc.init_rpc(f"worker{harness.RANK}", rank=harness.RANK, world_size=harness.WORLD_SIZE)
neighbour = f"worker{(harness.RANK + 1) % harness.WORLD_SIZE}"
answer = rpc.rpc_sync(neighbour, torch.add, args=(torch.tensor(10), harness.RANK))
harness.trace("called", neighbour=neighbour, answer=int(answer))
rpc.shutdown()
harness.exit_now()
