"""The model's gradients in a few long buffers, each summed over the ranks while the backward pass computes the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .boxes import is_sharded
from .group import Group

# As PyTorch's DistributedDataParallel has them. The first bucket is small, so that sums begin early.
_FIRST_BUCKET = 1 << 20
_BUCKET = 25 << 20

# What ranks tell each other beside the last bucket of a step: how many know of a change, and how many leave.
_VOTES = 2


class _Bucket:
    """Some parameters' gradients, one after the other in one tensor."""

    def __init__(self, parameters: list[torch.nn.Parameter], extra: int) -> None:
        self.parameters, self._extra = parameters, extra
        self.allocate()
        # How many gradients the backward pass still has to compute.
        self.missing = 0
        # Whether the parameters' gradients lie here.
        self.filled = False
        self.sharded = any(map(is_sharded, parameters))

    def allocate(self) -> None:
        """Takes new memory. The former stays with the sums that are under way in it."""
        parts = [_part(parameter) for parameter in self.parameters]
        like = parts[0] if parts else torch.empty(0)
        size = sum(part.numel() for part in parts)
        self.flat = torch.zeros(size + self._extra, dtype=like.dtype, device=like.device)
        self.votes = self.flat[size:]
        self.views, at = [], 0
        for part in parts:
            self.views.append(self.flat[at : at + part.numel()].view_as(part))
            at += part.numel()

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
                found.append(_part(parameter.grad))
                places.append(view)
            parameter.grad = _gradient_of(parameter, view)
        if found:
            torch._foreach_copy_(places, found)
        self.filled = True


class Gradients:
    """The gradients of a model, and their sum over a group. Those of a sharded model's part are summed after the backward
    pass: a sum that fails must not end a pass that the node's other ranks wait for."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], bucket_bytes: int = _BUCKET) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            raise ValueError("the model has no parameter that requires a gradient")
        # From the last to the first: about the order in which the backward pass has them.
        self._buckets = [_Bucket(part, 0) for part in cut(list(reversed(trained)), bucket_bytes)]
        last = self._buckets[-1].parameters
        # Half precision cannot count beyond 256.
        if torch.finfo(last[0].dtype).bits >= 32:
            self._buckets[-1] = _Bucket(last, _VOTES)
        else:
            self._buckets.append(_Bucket([], _VOTES))
        self._place = {
            parameter: (bucket, number)
            for bucket in self._buckets
            for number, parameter in enumerate(bucket.parameters)
        }
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in self._place
            if not is_sharded(parameter)
        ]
        self._group: Group | None = None
        self._votes = (False, False)
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
        sharded model chooses where its gradients are until the sums begin."""
        for bucket in self._buckets:
            if not bucket.sharded:
                bucket.fill()

    def sum_over(self, group: Group, *, changing: bool, leaving: bool) -> None:
        """The next backward pass is this rank's last of the step: its gradients are summed over `group`. changing,
        leaving: this rank's votes: it knows that the group changes, and it leaves."""
        self._group, self._votes, self._works = group, (changing, leaving), []
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def finish(self) -> tuple[int, int]:
        """Waits until all sums are complete, also of parameters that the backward pass has not used here. Returns the
        number of ranks that know of a change, and of those that leave."""
        while len(self._works) < len(self._buckets):
            self._start(self._buckets[len(self._works)])
        group, self._group = self._group, None
        for work in self._works:
            group.finish(work)
        if group.size == 1:
            # There is no sum to wait for: the GPU computes on while the next calls are made.
            changing, leaving = self._votes
            return int(changing), int(leaving)
        changing, leaving = self._buckets[-1].votes.tolist()
        return round(changing), round(leaving)

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
        bucket.missing -= 1
        # In one order on every rank.
        while len(self._works) < len(self._buckets) and self._buckets[len(self._works)].missing == 0:
            self._start(self._buckets[len(self._works)])

    def _start(self, bucket: _Bucket) -> None:
        bucket.fill()
        if bucket is self._buckets[-1]:
            for place, vote in zip(bucket.votes.unbind(), self._votes):
                # An assignment would copy the number from the host, and wait for all that the GPU has to do.
                place.fill_(float(vote))
        self._works.append(self._group.start_sum(bucket.flat))


def refuse_others(optimizer: torch.optim.Optimizer, trained: set[torch.nn.Parameter]) -> None:
    """Raises ValueError if the optimizer changes a parameter whose gradient is not summed: each rank would change its own
    in another way. trained: the parameters whose gradients are."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter not in trained:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that needs a gradient, and that "
                    "the session's model did not have, or had frozen, when the session was made: give the session a "
                    "model that holds all that is trained, such as torch.nn.ModuleList([model, criterion]), and "
                    "unfreeze before"
                )


def _part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor


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
        bytes_ = _part(parameter).numel() * parameter.element_size()
        limit = min(_FIRST_BUCKET, most) if len(parts) == 1 else most
        fits = parts and size + bytes_ <= limit
        if not (fits and (parts[-1][0].dtype, parts[-1][0].device) == (parameter.dtype, parameter.device)):
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += bytes_
    return parts
