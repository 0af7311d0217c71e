"""Sends the state of the furthest rank to all ranks, where each node keeps checkpoints on its own disk."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from . import tree


def share_furthest(step: int, state: Any = None) -> tuple[int, Any]:
    """Each rank gives the step and the content of the checkpoint that it has found, or 0 and None. Returns the furthest
    step and its state on all ranks, from the lowest rank that has it; 0 and None if no rank has any.

    All ranks of the default process group call this, after `init_process_group`. A state is made of dicts, lists,
    numbers, strings and tensors, as a `state_dict` is. It goes over gloo, unencrypted; ranks receive its tensors on the
    CPU. TorchElastic's ImageNet example resumes in this way: after a change of the group its rank 0 may be a new machine.
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
        return int(steps[furthest]), broadcast(state, furthest, group)
    finally:
        dist.destroy_process_group(group)


def broadcast(state: Any, source: int, group: Any) -> Any:
    """The state of rank `source`, on all ranks of a group over gloo."""
    own = dist.get_rank() == source
    description, tensors = tree.take_apart(state) if own else (None, [])
    text = tree.to_bytes(description)
    length = torch.tensor([len(text)])
    dist.broadcast(length, source, group=group)
    if not own:
        text = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(text, source, group=group)
    if not own:
        description = tree.of_bytes(text)
        tensors = tree.room_for(description)
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(tree.as_bytes(tensor), source, group=group)
    return state if own else tree.put_together(description, tensors)
