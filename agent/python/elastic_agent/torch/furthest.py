"""Sends the state of the furthest rank to all ranks, where each node keeps checkpoints on its own disk."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from . import tree
from .state import as_bytes


def share_furthest(step: int, state: Any = None) -> tuple[int, Any]:
    """Every rank tells the step of the checkpoint that it has found, and gives what that holds; a rank that has found
    none gives 0 and None. Returns the furthest step, and its state, on all ranks: of those that are as far, the
    lowest has sent it. If no rank has any, that is 0 and None.

    All ranks of the default process group call this, after `init_process_group`. A state is made of dicts, lists,
    numbers, strings and tensors, as a `state_dict` is; on the ranks that receive it, its tensors are on the CPU. It
    goes over gloo, in the clear, as gradients do.

    This is how TorchElastic's ImageNet example resumes: after a change of the group its rank 0 may be a new machine.
    """
    group = dist.new_group(backend="gloo")
    try:
        rank, size = dist.get_rank(), dist.get_world_size()
        steps = torch.zeros(size, dtype=torch.int64)
        steps[rank] = step if state is not None else -1
        dist.all_reduce(steps, group=group)
        furthest = int(steps.argmax())
        if steps[furthest] < 0:
            return 0, None
        received = _broadcast(state, furthest, rank, group)
        return int(steps[furthest]), state if rank == furthest else received
    finally:
        dist.destroy_process_group(group)


def _broadcast(state: Any, source: int, rank: int, group: Any) -> Any:
    """The state of rank `source`, which this rank has got; nothing, on that rank itself."""
    description, tensors = tree.take_apart(state) if rank == source else (None, [])
    text = tree.to_bytes(description)
    length = torch.tensor([len(text)])
    dist.broadcast(length, source, group=group)
    if rank != source:
        text = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(text, source, group=group)
    if rank != source:
        description = tree.of_bytes(text)
        tensors = tree.room_for(description)
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(as_bytes(tensor), source, group=group)
    return None if rank == source else tree.put_together(description, tensors)
