"""Calls its neighbour by name, over PyTorch's RPC."""

import story

story.begin()

import torch
import torch.distributed.rpc as rpc

rpc.init_rpc(f"worker{story.RANK}", rank=story.RANK, world_size=story.WORLD_SIZE)
neighbour = f"worker{(story.RANK + 1) % story.WORLD_SIZE}"
answer = rpc.rpc_sync(neighbour, torch.add, args=(torch.tensor(10), story.RANK))
story.tell("called", neighbour=neighbour, answer=int(answer))
rpc.shutdown()
story.leave()
