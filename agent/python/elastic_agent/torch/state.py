"""What a rank holds of the training, as one value: made, copied between ranks, written to a file."""

from __future__ import annotations

import hashlib
import os
import pathlib
from typing import Any

import torch

from .. import worker
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


def save(
    state: Any, folder: pathlib.Path, step: int, round_: int, *, keep: int, timeout: float, note: str = ""
) -> None:
    """Writes a checkpoint and has the agent commit it. The newest `keep` stay. `note`: where others than rank 0 write."""
    # Its round is in its name: what a rank of an earlier round still writes has another.
    path = folder / name_of(step, round_, note)
    write(state, path)
    if worker.available():
        worker.commit_checkpoint(step, path, timeout=timeout)
    older = [one for one in sorted(folder.glob("step-*-round-*.pt")) if one.name < path.name]
    for old in older[: len(older) - keep + 1]:
        old.unlink()


def name_of(step: int, round_: int, note: str = "") -> str:
    """The file name of a checkpoint. By name they are in the order of their steps."""
    return f"step-{step:010}-round-{round_}{note}.pt"


def digest_of(path: pathlib.Path) -> str:
    """The digest of a file's bytes, as a commit has it."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            sha.update(block)
    return f"sha256:{sha.hexdigest()}"


def read(checkpoint: dict[str, Any]) -> Any:
    """The state of a committed checkpoint, if its bytes are those that were committed."""
    path = pathlib.Path(checkpoint["path"])
    digest = digest_of(path)
    if digest != checkpoint["digest"]:
        raise ValueError(
            f"{path} is not the checkpoint that was committed (it has {digest}, committed was {checkpoint['digest']}): "
            "restore the file, or begin another job"
        )
    return torch.load(path, map_location="cpu", weights_only=True)
