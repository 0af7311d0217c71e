"""What a script may ask of all ranks of its group at once. Who answers for a lost peer is said in loop.py and session.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

from . import tree
from .gradients import BUCKET, cut
from .group import Group


def total(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks, without a gradient."""
    whole = tensor.detach().clone()
    group.finish(group.start_sum(whole))
    return whole


def mean(group: Group, value: Any, count: float) -> Any:
    """The mean over the ranks. Each rank counts as its `count`: of numbers a number, of tensors a tensor."""
    own = torch.as_tensor(value, dtype=torch.float64)
    sums = total(group, torch.cat([own.reshape(-1) * count, own.new_full((1,), count)]))
    found = (sums[:-1] / sums[-1]).view(own.shape)
    return found if isinstance(value, torch.Tensor) else float(found)


def of_rank_0(group: Group, value: Any) -> Any:
    """What rank 0 has. Raises TypeError for what cannot be sent as text."""
    description, tensors = tree.take_apart(value, "the value")
    if tensors:
        raise TypeError("ranks agree on plain values, such as numbers and text: not on tensors")
    return tree.put_together(json.loads(group.gather_texts(json.dumps(description) if group.rank == 0 else "")[0]), [])


def gather(group: Group, tensor: torch.Tensor, refused: str) -> torch.Tensor:
    """The rows of all ranks, in the order of ranks. Gradients go back to the ranks that the rows are from. refused: why
    this rank cannot take part. All ranks then raise a RuntimeError."""
    counts = group.gather(-1 if refused else len(tensor))
    if min(counts) < 0:
        raise RuntimeError(refused or "another rank of the group cannot gather")
    return _Gathered.apply(tensor, group, counts)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Group, counts: list[int]) -> torch.Tensor:
        ctx.group, first = group, sum(counts[: group.rank])
        ctx.own = slice(first, first + len(own))
        whole = own.new_zeros((sum(counts), *own.shape[1:]))
        whole[ctx.own] = own
        group.finish(group.start_sum(whole))
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # Each rank's loss depends on the rows of all.
        return total(ctx.group, gradient.contiguous())[ctx.own], None, None


def mean_gradients(group: Group, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Gives parameters the mean of all ranks' gradients."""
    under_way = []
    for bucket in cut([one for one in parameters if one.requires_grad], BUCKET):
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in bucket]
        flat = torch.cat([one.reshape(-1) for one in gradients]).div_(group.size)
        under_way.append((bucket, flat, group.start_sum(flat)))
    for bucket, flat, work in under_way:
        group.finish(work)
        for parameter, part in zip(bucket, flat.split([one.numel() for one in bucket])):
            parameter.grad = part.view_as(parameter)
