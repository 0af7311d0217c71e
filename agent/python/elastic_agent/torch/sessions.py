"""The sessions of a script: which of them this is, and the results of those that are completed. A late worker runs the
script from its beginning, and gets these from the others."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import tree

_entered = 0
# By their numbers, what `tree.take_apart` gives.
_results: dict[int, tuple[Any, list[torch.Tensor]]] = {}


@dataclass(frozen=True)
class Which:
    """One of the sessions that this process has entered, counted from 0, and the script's name for it."""

    number: int
    name: str

    @property
    def word(self) -> int:
        """A number that is the same on all ranks of one session."""
        return self.number << 32 | zlib.crc32(self.name.encode())

    def complete(self, value: Any) -> None:
        """Keeps its result for workers that start later, if it has a name. It takes the memory of a model."""
        if self.name:
            description, tensors = tree.take_apart(value)
            _results[self.number] = description, [one.detach().to("cpu", copy=True) for one in tensors]


def enter(name: str) -> Which:
    """The session that this process enters now."""
    global _entered
    _entered += 1
    return Which(_entered - 1, name)


def number_of(word: int) -> int:
    """The number of the session that has this word."""
    return word >> 32


def behind(words: Sequence[int]) -> tuple[int, list[int]]:
    """The first session that any rank is in, and the ranks that are there."""
    first = min(map(number_of, words))
    return first, [rank for rank, word in enumerate(words) if number_of(word) == first]


def has_result(number: int) -> bool:
    """Whether this process has kept that session's result."""
    return number in _results


def result(number: int, mesh: Any = None) -> Any:
    """The result of a session. mesh: gives the device mesh of what is described as sharded."""
    return tree.put_together(*_results[number], mesh)
