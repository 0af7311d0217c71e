"""Sees that all ranks train the same model: in each step they compare one part of its parameters and of the optimizer's
state, and in turn all parts.

    each rank's mark of the part ──▶ sent with the votes ──▶ all are equal: the step is applied
                                           │ they are not
                                           ▼
           the part itself ──▶ only the last bits differ: all take those of one rank
                     └──▶ more differs: the job ends, and a line names the rank and the parameter
"""

from __future__ import annotations

import collections
import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import worker
from . import tree
from .boxes import part_of
from .group import Group
from .keeper import say
from .state import Training

# Steps until all parts were compared, and the numbers of a part that is small enough to be one.
_TURNS, _LEAST = 100, 1 << 10
# The largest prime number below 2**24: marks are the remainders.
_MODULUS = (1 << 24) - 3
# Ranks may differ by so many times the smallest difference of single-precision numbers. Machines of two kinds, or with
# other numbers of threads, clip a gradient to other last bits; a gradient that was not summed gives far more.
_LAST_BITS = 64


@dataclass(frozen=True)
class _Slice:
    """A run of numbers of a tensor."""

    name: str
    tensor: torch.Tensor
    first: int
    end: int

    def numbers(self) -> torch.Tensor:
        """They may be the tensor's own memory."""
        flat = self.tensor.detach().reshape(-1)
        return flat if self.end - self.first == flat.numel() else flat[self.first : self.end]

    def take(self, numbers: torch.Tensor) -> None:
        """Puts others there."""
        whole = self.tensor.detach().reshape(-1).clone()
        whole[self.first : self.end] = numbers.to(whole.device)
        self.tensor.detach().copy_(whole.view(self.tensor.shape))

    def tolerance(self) -> float:
        """How much of their size the last bits are."""
        if not self.tensor.is_floating_point():
            return 0.0
        return max(_LAST_BITS * torch.finfo(torch.float32).eps, torch.finfo(self.tensor.dtype).eps)


class Sameness:
    """What one rank compares with the others."""

    def __init__(self, training: Training) -> None:
        self._training = training
        parameters = list(training.model.named_parameters())
        self._parts = cut([part_of(one).numel() for _, one in parameters])
        self._parameters, self._device = parameters, parameters[-1][1].device
        self._said = False

    def mark(self, *, counted: bool) -> int | torch.Tensor:
        """A number that has to be equal on all ranks in this step: of its part, and of all facts. A GPU is not waited
        for. counted: whether the step's losses are sums."""
        total: Any = zlib.crc32(repr(self._facts(counted)).encode())
        for one in self._slices():
            if one.end > one.first:
                of_slice = tree.sum_of_bits(one.numbers())
                of_slice = of_slice.item() if of_slice.device.type == "cpu" else of_slice.to(self._device)
                # Below 2**24 each: their sum is no overflow.
                total = total + of_slice % _MODULUS
        return total % _MODULUS

    def compare(self, group: Group, marks: Sequence[int], *, counted: bool, before: Callable[[], None]) -> None:
        """All ranks call this with the same marks. Ends the job if they differ by more than last bits. before: called
        before the state is changed."""
        if len(set(marks)) <= 1:
            return
        of = reference(marks)
        slices = [one for one in self._slices() if one.end > one.first]
        shapes = {one.name: f"{one.end - one.first} numbers of {one.tensor.dtype}" for one in slices}
        told = group.gather_texts(json.dumps({**self._facts(counted), **shapes}))
        machines = group.gather_texts(_machine(self._device))
        found = unlike_facts([json.loads(one) for one in told], of)
        if not found:
            theirs = [self._of_rank(group, of, one) for one in slices]
            apart = [(_apart(one.numbers(), other), one) for one, other in zip(slices, theirs)]
            beyond = [
                f"{one.name} on rank {group.rank} differs from that on rank {of} by {far:.1e} of its size"
                for far, one in apart
                if far > one.tolerance()
            ]
            found = list(filter(None, group.gather_texts(beyond[0] if beyond else "")))
        if found:
            worker.give_up(complaint(found, marks, of, self._training.step_number, machines))
        before()
        for one, other in zip(slices, theirs):
            one.take(other)
        if not self._said and group.rank == 0:
            self._said = True
            say(
                f"the last bits of what the ranks compute differ ({_each(machines)}). All ranks take those of one, of "
                f"each parameter every {len(self._parts)} steps"
            )

    def _facts(self, counted: bool) -> dict[str, Any]:
        """What is not a tensor, and has to be equal: of the optimizer one group in each step."""
        sampler = self._training.sampler
        groups = [group for one in self._training.optimizers for group in one.param_groups]
        number = self._training.step_number % len(groups)
        facts = {"the step": self._training.step_number, "the epoch": sampler.epoch, "the position": sampler.position}
        facts |= {"the number of the optimizer's groups": len(groups), "whether `backward` gets a count": counted}
        for name, value in groups[number].items():
            if name != "params" and (plain := _plain(value)) is not None:
                facts[f"{name} of the optimizer's group {number}"] = plain
        return facts

    def _slices(self) -> Iterator[_Slice]:
        """The part of this step."""
        for number, first, end in self._parts[self._training.step_number // self._training.stride % len(self._parts)]:
            name, parameter = self._parameters[number]
            part = part_of(parameter)
            yield _Slice(f"the parameter {name!r}", part, first, end)
            states = (one.state[parameter] for one in self._training.compared if parameter in one.state)
            state = next(states, {})
            for key in sorted(key for key, value in state.items() if isinstance(value, torch.Tensor)):
                one = part_of(state[key])
                if one.numel() == part.numel():
                    yield _Slice(f"the optimizer's {key!r} of {name!r}", one, first, end)
                elif first == 0:
                    yield _Slice(f"the optimizer's {key!r} of {name!r}", one, 0, one.numel())

    def _of_rank(self, group: Group, rank: int, one: _Slice) -> torch.Tensor:
        """The numbers that `rank` has there."""
        numbers = one.numbers().cpu().clone()
        group.finish(group.start_broadcast(tree.as_bytes(numbers), rank))
        return numbers


def cut(sizes: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Cuts tensors of these sizes into parts. Each is a list of runs: a tensor's number, where it begins, and its end."""
    most = max(_LEAST, -(-sum(sizes) // _TURNS))
    # In whole words of eight bytes, whatever a number takes.
    most = -(-most // 8) * 8
    parts: list[list[tuple[int, int, int]]] = [[]]
    left = most
    for number, size in enumerate(sizes):
        at = 0
        while at < size:
            if left < 8:
                parts.append([])
                left = most
            end = size if size - at <= left else at + left // 8 * 8
            parts[-1].append((number, at, end))
            left -= end - at
            at = end
    return parts


def reference(marks: Sequence[int]) -> int:
    """The first rank of those that most agree with."""
    (mark, _), *_ = collections.Counter(marks).most_common(1)
    return marks.index(mark)


def unlike_facts(facts: Sequence[dict[str, Any]], of: int) -> list[str]:
    """The first fact of each rank that is another than that of rank `of`."""
    found = []
    for rank, own in enumerate(facts):
        for name in [*facts[of], *own]:
            here, there = own.get(name, "missing"), facts[of].get(name, "missing")
            if not _alike(here, there):
                found.append(f"{name} is {there} on rank {of}, and {here} on rank {rank}")
                break
    return found


def _plain(value: Any) -> Any:
    """A setting of an optimizer, if it is made of numbers. None for others, such as a tensor, or an option that only a
    later version of PyTorch has."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # What NumPy computed, and what was received, are the same.
        return float(value)
    if isinstance(value, (tuple, list)):
        parts = list(map(_plain, value))
        return None if None in parts else parts
    return None


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        # Two machines may compute the last bits of a learning rate differently.
        return math.isclose(one, other, rel_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    return one == other


def complaint(found: Sequence[str], marks: Sequence[int], of: int, step: int, machines: Sequence[str]) -> str:
    """What a person reads. found: what differs from rank `of`, and where."""
    most = f"Most ranks agree with rank {of}" if 2 * marks.count(marks[of]) > len(marks) else "No majority agrees"
    other = f" The machines are not alike: {_each(machines)}." if len(set(machines)) > 1 else ""
    return (
        f"the ranks do not train the same model after step {step}: {'; '.join(found)}. {most}. The script changes it by "
        "more than the session's steps, or not on all ranks in the same way: it may change parameters, optimizer and "
        f"learning rate only by what is the same on all ranks.{other}"
    )


def _each(machines: Sequence[str]) -> str:
    """Which ranks have which machine."""
    ranks: dict[str, list[str]] = {}
    for rank, one in enumerate(machines):
        ranks.setdefault(one, []).append(str(rank))
    return "; ".join(f"rank {', '.join(of)}: {one}" for one, of in ranks.items())


def _machine(device: torch.device) -> str:
    """What the last bits of a result depend on."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return f"PyTorch {torch.__version__}, {kind}, {torch.get_num_threads()} threads"


def _apart(own: torch.Tensor, theirs: torch.Tensor) -> float:
    """The size of the difference, as a part of the numbers' size."""
    one, other = own.cpu().double(), theirs.double()
    if torch.equal(own.cpu(), theirs):
        return 0.0
    far = float((one - other).norm()) / max(float(other.norm()), torch.finfo(torch.float64).tiny)
    return far if math.isfinite(far) else math.inf
