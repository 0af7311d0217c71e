"""Puts a sharded state together for a group that is not the one that made it: each rank gets its new part, out of the
parts that the others hold. Which snapshot that is, is decided elsewhere."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import boxes, tree
from .boxes import Box, Layout
from .slots import Snapshot


def assemble(
    group: Any, held: Mapping[int, Snapshot], senders: Sequence[int], layouts: Sequence[Layout], mesh: Any
) -> Any:
    """The state, each sharded tensor this rank's part of it. Every rank of the group calls this.

    held: this rank's snapshots, by the number of their part. senders: the rank that gives each part. layouts: each rank's
    now. mesh: gives the device mesh of what is described as sharded. Raises ValueError, on every rank, if the parts do
    not make up a whole.
    """
    rank = dist.get_rank(group) if group else 0
    outlines = _outlines(group, rank, held, senders)
    descriptions = [tree.tensors_of(one) for one in outlines]
    _check(descriptions)
    sources = {part: held[part].tensors() for part, sender in enumerate(senders) if sender == rank}
    # What is not sharded is alike in all parts.
    target = copy.deepcopy(outlines[0])
    tensors = []
    for number, one in enumerate(tree.tensors_of(target)):
        wanted = [boxes.box_for(one, layout) for layout in layouts]
        boxes.redescribe(one, layouts[rank])
        tensor = torch.empty(one["shape"], dtype=tree.dtype_of(one))
        pieces = _pieces(number, [parts[number] for parts in descriptions], senders, wanted)
        _move(group, rank, tensor, wanted[rank], pieces, {part: own[number] for part, own in sources.items()})
        tensors.append(tensor)
    return tree.put_together(target, tensors, mesh)


def _outlines(group: Any, rank: int, held: Mapping[int, Snapshot], senders: Sequence[int]) -> list[Any]:
    """The description of each part."""
    mine = {part: held[part].description for part, sender in enumerate(senders) if sender == rank}
    told: list[Any] = [mine]
    if group:
        told = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, mine, group=group)
    return [told[sender][part] for part, sender in enumerate(senders)]


def _check(descriptions: list[list[dict[str, Any]]]) -> None:
    forms = {tuple((tuple(boxes.whole_shape(one)), one["dtype"]) for one in parts) for parts in descriptions}
    if len(forms) > 1:
        raise ValueError("the parts are not of one state: their tensors differ in number, shape or kind")
    for number, of_parts in enumerate(zip(*descriptions)):
        whole = math.prod(boxes.whole_shape(of_parts[0]))
        found = sum(math.prod(box.shape) for box in {boxes.box_in(one) for one in of_parts})
        if found != whole:
            raise ValueError(f"of tensor {number} the parts hold {found} of {whole} numbers")


def _pieces(
    number: int, of_parts: list[dict[str, Any]], senders: Sequence[int], wanted: list[Box]
) -> list[tuple[int, Box, int, int, Box]]:
    """What moves of one tensor: the part and its box, the sender, the receiver, and the box of the piece. The same on
    every rank, in the same order."""
    same: dict[Box, list[int]] = {}
    for part, one in enumerate(of_parts):
        same.setdefault(boxes.box_in(one), []).append(part)
    found = []
    for box, parts in same.items():
        for receiver, target in enumerate(wanted):
            piece = boxes.overlap(box, target)
            if piece is not None:
                own = [part for part in parts if senders[part] == receiver]
                # Those that have the same take turns.
                part = own[0] if own else parts[(number + receiver) % len(parts)]
                found.append((part, box, senders[part], receiver, piece))
    return found


def _move(group: Any, rank: int, into: torch.Tensor, own: Box, pieces: list[Any], sources: Any) -> None:
    works, arriving, kept = [], [], []
    for part, box, sender, receiver, piece in pieces:
        if sender == rank:
            source = _narrow(sources[part], box, piece)
            if receiver == rank:
                _narrow(into, own, piece).copy_(source)
            else:
                kept.append(tree.as_bytes(source))
                works.append(dist.isend(kept[-1], receiver, group=group, tag=part))
        elif receiver == rank:
            arriving.append((piece, torch.empty(piece.shape, dtype=into.dtype)))
            works.append(dist.irecv(tree.as_bytes(arriving[-1][1]), sender, group=group, tag=part))
    for work in works:
        work.wait()
    for piece, came in arriving:
        _narrow(into, own, piece).copy_(came)


def _narrow(tensor: torch.Tensor, box: Box, piece: Box) -> torch.Tensor:
    """The piece of a tensor that is itself the box of a larger one."""
    for dimension, (begin, at, length) in enumerate(zip(piece.offset, box.offset, piece.shape)):
        tensor = tensor.narrow(dimension, begin - at, length)
    return tensor
