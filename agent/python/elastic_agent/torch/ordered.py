"""The gradients of a model, added in one order whatever the number of ranks: so the sum has the same bits.

    rank 0: piece 0 + piece 1 ──▶ rank 1: + piece 2 + piece 3 ──▶ … ──▶ the last rank: the sum ──▶ all ranks
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .gradients import cut
from .group import Group
from .votes import Vote, Votes, room

# What goes from rank to rank at once. While one has it, the rank before it adds up the next.
_BUCKET = 4 << 20

# How many buckets a rank may be ahead of the next one.
_AHEAD = 16


class OrderedGradients:
    """The gradients of a model, and their sum over a group, piece by piece in the order of the step's samples.

    The sum of gloo's ring depends on the number of ranks, because floating-point addition is not associative. Here each
    rank adds its pieces to what the one before it sends. That costs a pass through all ranks after the backward pass of
    each step, and on all ranks except the first a gradient's memory for each piece. It is done on the CPU.
    """

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """named: a model's parameters with their names."""
        self._parameters = [parameter for _, parameter in named if parameter.requires_grad]
        if not self._parameters:
            raise ValueError("the model has no parameter that requires a gradient")
        # What the backward pass has last is sent last.
        self._buckets = cut(list(reversed(self._parameters)), _BUCKET)
        self._pieces: list[list[torch.Tensor]] = []
        self._group: Group | None = None
        self._vote = Vote()

    def clear(self) -> None:
        """Forgets all gradients, and sums that were given up. Of these nothing may be under way any more."""
        self._pieces, self._group = [], None
        for parameter in self._parameters:
            parameter.grad = None

    def keep(self, *, first: bool) -> None:
        """The backward pass of one piece is over. first: this is the rank that has the first piece of the step, so that
        what it has is a sum already."""
        piece = []
        for bucket in self._buckets:
            of_parameters = [torch.zeros_like(one) if one.grad is None else one.grad for one in bucket]
            piece.append(torch.cat([one.reshape(-1) for one in of_parameters]).cpu())
        for parameter in self._parameters:
            parameter.grad = None
        if first and self._pieces:
            for whole, part in zip(self._pieces[0], piece):
                whole.add_(part)
        else:
            self._pieces.append(piece)

    def sum_over(self, group: Group, vote: Vote) -> None:
        """The next piece is this rank's last one of the step."""
        self._group, self._vote = group, vote

    def finish(self) -> Votes:
        """Returns with the group's gradient in the parameters."""
        group, pieces = self._group, self._pieces
        self._group, self._pieces = None, []
        last = group.size - 1
        votes = torch.zeros(room(group.size), dtype=torch.float64)
        self._vote.write(votes, group.rank)
        works: list[Any] = [group.start_sum(votes)]
        sums = []
        for number, bucket in enumerate(self._buckets):
            parts = [piece[number] for piece in pieces]
            whole = torch.zeros(sum(one.numel() for one in bucket), dtype=bucket[0].dtype)
            if group.rank > 0:
                group.finish(group.start_receive([whole], group.rank - 1))
            for part in parts:
                whole.add_(part)
            if group.rank < last:
                works.append(group.start_send([whole], group.rank + 1))
                if len(works) > _AHEAD:
                    # Each has a thread.
                    group.finish(works.pop(1))
            else:
                works.append(group.start_broadcast(whole, last))
            sums.append(whole)
        if group.rank < last:
            # What is sent on must have gone before the whole sum takes its place.
            for work in works[1:]:
                group.finish(work)
            works = works[:1] + [group.start_broadcast(whole, last) for whole in sums]
        for work in works:
            group.finish(work)
        for bucket, whole in zip(self._buckets, sums):
            for parameter, grad in zip(bucket, whole.split([one.numel() for one in bucket])):
                parameter.grad = grad.view_as(parameter).to(parameter.device)
        return Votes.read(votes) if group.size > 1 else Votes.of_one(self._vote)

    def divide(self, count: float) -> None:
        """After `finish`: divides the step's gradient."""
        for parameter in self._parameters:
            parameter.grad.div_(count)

    def remove(self) -> None:
        """Nothing is fastened to the parameters."""
