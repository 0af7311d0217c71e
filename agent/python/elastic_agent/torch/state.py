"""What a rank holds of the training, as one value, on its way between ranks."""

from __future__ import annotations

from typing import Any

import torch

from . import tree
from .group import Group


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, in order, on the CPU. Another name for the same memory, where it lies so already."""
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8)


def _senders(descriptions: list[dict[str, Any]], holders: list[int]) -> list[int]:
    """Which holder sends each tensor: always one that has least to send so far. Every rank comes to the same answer."""
    load = dict.fromkeys(holders, 0)
    chosen = []
    for one in descriptions:
        holder = min(load, key=lambda rank: (load[rank], rank))
        load[holder] += tree.size_of(one)
        chosen.append(holder)
    return chosen


def send(group: Group, state: Any, holders: list[int], receivers: list[int]) -> None:
    """Sends this rank's part of `state` to all `receivers`. Every holder calls this, with an equal state."""
    description, tensors = tree.take_apart(state)
    works, kept = [], []
    if group.rank == holders[0]:
        text = tree.to_bytes(description)
        length = torch.tensor([len(text)])
        kept += [text, length]
        for rank in receivers:
            works += [group.start_send(length, rank, 0), group.start_send(text, rank, 1)]
    for number, sender in enumerate(_senders(tree.tensors_of(description), holders)):
        if sender == group.rank and tensors[number].numel():
            flat = as_bytes(tensors[number])
            kept.append(flat)
            works += [group.start_send(flat, rank, number + 2) for rank in receivers]
    for work in works:
        group.finish(work)


def receive(group: Group, holders: list[int], mesh: Any = None) -> Any:
    """The state that the holders send, each a part of it. `mesh`: what sharded tensors of it lie on."""
    length = torch.zeros(1, dtype=torch.int64)
    group.finish(group.start_receive(length, holders[0], 0))
    text = torch.empty(int(length), dtype=torch.uint8)
    group.finish(group.start_receive(text, holders[0], 1))
    description = tree.of_bytes(text)
    described, tensors = tree.tensors_of(description), tree.room_for(description)
    works = []
    for number, sender in enumerate(_senders(described, holders)):
        if tensors[number].numel():
            flat = tensors[number].reshape(-1).view(torch.uint8)
            works.append(group.start_receive(flat, sender, number + 2))
    for work in works:
        group.finish(work)
    return tree.put_together(description, tensors, lambda _: mesh)
