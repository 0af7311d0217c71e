"""What a rank holds of the training, as one value: made, copied between ranks, written to a file."""

from __future__ import annotations

import hashlib
import os
import pathlib
import pickle
from typing import Any

import torch

from .group import Group


class _Tensor:
    """Stands in a state's description in place of a tensor."""

    def __init__(self, number: int, shape: list[int], dtype: torch.dtype) -> None:
        self.number, self.shape, self.dtype = number, shape, dtype


def _taken_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with each tensor replaced by a description; the tensors are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return _Tensor(len(tensors) - 1, list(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: _taken_apart(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_taken_apart(one, tensors) for one in value)
    return value


def _descriptions(value: Any) -> list[_Tensor]:
    if isinstance(value, _Tensor):
        return [value]
    if isinstance(value, dict):
        return [one for part in value.values() for one in _descriptions(part)]
    if type(value) in (list, tuple):
        return [one for part in value for one in _descriptions(part)]
    return []


def _put_together(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Tensor):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _put_together(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_together(one, tensors) for one in value)
    return value


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, in order, on the CPU. Another name for the same memory, where it lies so already."""
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8)


def _senders(descriptions: list[_Tensor], holders: list[int]) -> list[int]:
    """Which holder sends each tensor: always one that has least to send so far. Every rank comes to the same answer."""
    load = dict.fromkeys(holders, 0)
    chosen = []
    for one in descriptions:
        holder = min(load, key=lambda rank: (load[rank], rank))
        load[holder] += torch.Size(one.shape).numel() * one.dtype.itemsize
        chosen.append(holder)
    return chosen


def send(group: Group, state: Any, holders: list[int], receivers: list[int]) -> None:
    """Sends this rank's part of `state` to all `receivers`. Every holder calls this, with an equal state."""
    tensors: list[torch.Tensor] = []
    description = _taken_apart(state, tensors)
    works, kept = [], []
    if group.rank == holders[0]:
        text = torch.frombuffer(bytearray(pickle.dumps(description)), dtype=torch.uint8)
        length = torch.tensor([len(text)])
        kept += [text, length]
        for rank in receivers:
            works += [group.start_send(length, rank, 0), group.start_send(text, rank, 1)]
    for number, sender in enumerate(_senders(_descriptions(description), holders)):
        if sender == group.rank and tensors[number].numel():
            flat = _as_bytes(tensors[number])
            kept.append(flat)
            works += [group.start_send(flat, rank, number + 2) for rank in receivers]
    for work in works:
        group.finish(work)


def receive(group: Group, holders: list[int]) -> Any:
    """The state that the holders send, each a part of it."""
    length = torch.zeros(1, dtype=torch.int64)
    group.finish(group.start_receive(length, holders[0], 0))
    text = torch.empty(int(length), dtype=torch.uint8)
    group.finish(group.start_receive(text, holders[0], 1))
    # From ranks of the same job, which run the same script.
    description = pickle.loads(bytes(text.untyped_storage()))
    described = _descriptions(description)
    tensors = [torch.empty(one.shape, dtype=one.dtype) for one in described]
    works = []
    for number, sender in enumerate(_senders(described, holders)):
        if tensors[number].numel():
            flat = tensors[number].reshape(-1).view(torch.uint8)
            works.append(group.start_receive(flat, sender, number + 2))
    for work in works:
        group.finish(work)
    return _put_together(description, tensors)


def write(state: Any, path: pathlib.Path) -> None:
    """Writes a state to a file, durably: it is complete under its name, or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(checkpoint: dict[str, Any]) -> Any:
    """The state of a committed checkpoint, if its bytes are those that were committed."""
    path = pathlib.Path(checkpoint["path"])
    sha = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            sha.update(block)
    digest = f"sha256:{sha.hexdigest()}"
    if digest != checkpoint["digest"]:
        raise ValueError(
            f"{path} is not the checkpoint that was committed (it has {digest}, committed was {checkpoint['digest']}): "
            "restore the file, or begin another job"
        )
    return torch.load(path, map_location="cpu", weights_only=True)
