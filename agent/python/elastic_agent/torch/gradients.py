"""The model's gradients in a few long buffers, each summed over the ranks while the backward pass computes the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .boxes import is_sharded, part_of
from .group import Group
from .votes import Vote, Votes, room

# As PyTorch's DistributedDataParallel has them. The first bucket is small, so that sums begin early.
_FIRST_BUCKET = 1 << 20
BUCKET = 25 << 20


class _Bucket:
    """Some parameters' gradients, one after the other in one tensor. Places for votes may follow."""

    def __init__(self, parameters: list[torch.nn.Parameter], device: torch.device) -> None:
        self.parameters, self._device, self._extra = parameters, device, 0
        self.allocate()
        # The numbers of the gradients that the backward pass still has to compute.
        self.missing: set[int] = set()
        # Whether the parameters' gradients lie here.
        self.filled = False

    def allocate(self) -> None:
        """Takes new memory. The former stays with the sums that are under way in it."""
        parts = [part_of(parameter) for parameter in self.parameters]
        self._size = sum(part.numel() for part in parts)
        dtype = parts[0].dtype if parts else torch.float32
        self.flat = torch.zeros(self._size + self._extra, dtype=dtype, device=self._device)
        self.views, at = [], 0
        for part in parts:
            self.views.append(self.flat[at : at + part.numel()].view_as(part))
            at += part.numel()

    @property
    def votes(self) -> torch.Tensor:
        """The places behind the gradients."""
        return self.flat[self._size :]

    def make_room(self, extra: int) -> None:
        """Has `extra` places for votes from now on."""
        if extra == self._extra:
            return
        former, self._extra = self.views, extra
        self.allocate()
        if self.filled:
            for parameter, view, before in zip(self.parameters, self.views, former):
                view.copy_(before)
                parameter.grad = _gradient_of(parameter, view)

    def fill(self) -> None:
        """Takes the gradients in here, in one call for all: a call for each would keep a GPU waiting."""
        if self.filled:
            return
        found, places = [], []
        for parameter, view in zip(self.parameters, self.views):
            if parameter.grad is None:
                # The backward pass has not used it here.
                view.zero_()
            else:
                found.append(part_of(parameter.grad))
                places.append(view)
            parameter.grad = _gradient_of(parameter, view)
        if found:
            torch._foreach_copy_(places, found)
        self.filled = True


class Gradients:
    """The gradients of a model, and their sum over a group."""

    def __init__(
        self, named: Iterable[tuple[str, torch.nn.Parameter]], bucket_bytes: int = BUCKET, *, late: bool = False
    ) -> None:
        """named: a model's parameters with their names. late: sums begin after the backward pass, as where the replica
        has several ranks: a sum that fails must not end a pass that the others wait for."""
        self._names = {parameter: name for name, parameter in named if parameter.requires_grad}
        trained = list(self._names)
        if not trained:
            raise ValueError("the model has no parameter that requires a gradient")
        # From the last to the first: about the order in which the backward pass has them.
        self._buckets = [_Bucket(part, part[0].device) for part in cut(list(reversed(trained)), bucket_bytes)]
        last = self._buckets[-1].parameters
        # Half precision cannot count beyond 256.
        if torch.finfo(last[0].dtype).bits < 32:
            self._buckets.append(_Bucket([], last[0].device))
        self._place = {
            parameter: (bucket, number)
            for bucket in self._buckets
            for number, parameter in enumerate(bucket.parameters)
        }
        self._sharded = [parameter for parameter in trained if is_sharded(parameter)]
        self._late = late
        hooked = [] if late else self._place
        self._hooks = [one.register_post_accumulate_grad_hook(self._accumulated) for one in hooked]
        self._group: Group | None = None
        self._vote = Vote()
        self._works: list[Any] = []
        self.clear()

    def clear(self) -> None:
        """Forgets all gradients, and sums that were given up. The group of these is closed."""
        for bucket, work in zip(self._buckets, self._works):
            if work is not None and not work.over:
                bucket.allocate()
        self._group, self._works = None, []
        for bucket in self._buckets:
            bucket.filled = False
            for parameter in bucket.parameters:
                parameter.grad = None

    def keep(self, *, first: bool) -> None:
        """The backward pass of one batch is over. The step's other batches add to its gradients, in the buckets. A
        sharded model chooses where its gradients are until the sums begin; this rank gets its part of each, out of what
        the replica's ranks have."""
        for bucket in self._buckets if not self._late else ():
            bucket.fill()
        for one in self._sharded:
            if one.grad is not None and one.grad.placements != one.placements:
                one.grad = one.grad.redistribute(placements=one.placements)

    @contextlib.contextmanager
    def counting(self, share: float) -> Iterator[None]:
        """Around all of a batch's backward pass, of gradients that are summed late: multiplies what it computes. It does
        not find what earlier batches have left: the schedule of a pipeline divides all that is there."""
        earlier = [(one, one.grad) for one in self._place]
        for one, _ in earlier:
            one.grad = None
        yield
        for one, before in earlier:
            if one.grad is None:
                one.grad = before
                continue
            one.grad.mul_(share)
            if before is not None:
                one.grad.add_(before)

    def sum_over(self, group: Group, vote: Vote) -> None:
        """The next backward pass is this rank's last of the step: its gradients are summed over `group`."""
        self._group, self._vote, self._works = group, vote, []
        self._buckets[-1].make_room(room(group.size))
        for bucket in self._buckets:
            bucket.missing = set(range(len(bucket.parameters)))

    def finish(self) -> Votes:
        """Waits until all sums are complete, also of parameters that the backward pass has not used here."""
        while len(self._works) < len(self._buckets):
            self._start(self._buckets[len(self._works)])
        group, self._group = self._group, None
        for work in self._works:
            group.finish(work)
        if group.size == 1:
            # There is no sum to wait for: the GPU computes on while the next calls are made.
            return Votes.of_one(self._vote)
        return Votes.read(self._buckets[-1].votes)

    def divide(self, count: float) -> None:
        """After `finish`: divides the step's gradient."""
        for bucket in self._buckets:
            bucket.flat.div_(count)

    def remove(self) -> None:
        """Takes the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _accumulated(self, parameter: torch.nn.Parameter) -> None:
        bucket, number = self._place[parameter]
        if bucket.filled and parameter.grad.data_ptr() != bucket.views[number].data_ptr():
            raise RuntimeError("a gradient was replaced between two batches of a step: leave zero_grad to the session")
        if self._group is None:
            return
        if number not in bucket.missing:
            raise RuntimeError(
                f"the gradient of {self._names[parameter]!r} was computed twice in one backward pass, and its sum over "
                "the ranks may have begun: a layer that several checkpointed parts share needs "
                "checkpoint(…, use_reentrant=False)"
            )
        bucket.missing.discard(number)
        # In one order on every rank.
        while len(self._works) < len(self._buckets) and not self._buckets[len(self._works)].missing:
            self._start(self._buckets[len(self._works)])

    def _start(self, bucket: _Bucket) -> None:
        bucket.fill()
        if bucket is self._buckets[-1]:
            self._vote.write(bucket.votes, self._group.rank)
        self._works.append(self._group.start_sum(bucket.flat))


def _gradient_of(parameter: torch.nn.Parameter, view: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter, with the memory of `view`."""
    if not is_sharded(parameter):
        return view
    from torch.distributed.tensor import DTensor

    mesh, placements, shape, stride = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    return DTensor.from_local(view, mesh, placements, run_check=False, shape=shape, stride=stride)


def cut(parameters: list[torch.nn.Parameter], most: int) -> list[list[torch.nn.Parameter]]:
    """Parameters of one type and device each, of `most` bytes at most unless a single one has more."""
    parts: list[list[torch.nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        bytes_ = part_of(parameter).numel() * parameter.element_size()
        limit = min(_FIRST_BUCKET, most) if len(parts) == 1 else most
        fits = parts and size + bytes_ <= limit
        if not (fits and (parts[-1][0].dtype, parts[-1][0].device) == (parameter.dtype, parameter.device)):
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += bytes_
    return parts
