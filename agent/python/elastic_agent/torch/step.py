"""The step and the epoch of a session that are under way."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


class Turn(enum.Enum):
    """What the script must call next."""

    BACKWARD = enum.auto()
    STEP = enum.auto()
    NEXT_BATCH = enum.auto()


@dataclass
class Step:
    """The step under way."""

    # The sizes of this rank's batches, and how many are done.
    batches: list[int]
    done: int = 0
    turn: Turn = Turn.NEXT_BATCH
    loss: torch.Tensor | None = None
    # How many of what its losses are sums of. None: they are means.
    count: float | None = None
    # The ranks that know of a change, and those that leave.
    votes: tuple[int, int] = (0, 0)
    # What a learning rate follows from this step on.
    metric: float | None = None
    # Why the group was lost. The step is then done again in the next one.
    lost: str | None = None
    # Whether this rank has entered another group since.
    moved: bool = False
    # Whether the script of another rank has left the loop: the step is not applied, and this loop ends, too.
    ended: bool = False
    # Whether what follows the step, such as a change of the group, is done.
    settled: bool = False
    # When it began. What a script does aside does not count.
    began: float = field(default_factory=time.monotonic)

    @property
    def is_complete(self) -> bool:
        """Whether the gradient of all ranks is in the parameters, and the script calls `step` next."""
        return self.turn is Turn.STEP and self.lost is None and not self.ended and self.done == len(self.batches)

    @property
    def size(self) -> int:
        """The samples of the batch under way."""
        return self.batches[self.done]

    def begin_backward(self, called: str, *, counted: bool) -> None:
        """called: what the script has called, counted with a count. Raises RuntimeError if it is not for a batch now."""
        if self.turn is not Turn.BACKWARD:
            raise RuntimeError(f"{called} is for a batch of session.steps, once for each")
        if self.done and counted is (self.count is None):
            raise RuntimeError(f"give {called} a count with each batch of a step, or with none")

    def share(self, count: float | None, readers: int, whole: int = 1) -> float:
        """How much the loss of the batch under way counts, on one of a replica's `readers` in a step of `whole` samples:
        a mean, or a sum over `count`."""
        size = self.size
        if count is None:
            # A sharded model's gradients are means over the ranks that read.
            return size * readers / whole
        # A batch without samples only keeps step with other ranks.
        self.count = (self.count or 0) + count * (size > 0)
        return float(readers * (size > 0))

    @property
    def can_wait(self) -> bool:
        """After the last step of a loop: whether a change of the group can wait until the next one begins. What is
        between both, such as an evaluation, workers that join do not do."""
        return self.votes[1] == 0 and (self.votes[0] > 0 or self.lost is not None)


@dataclass(frozen=True)
class Epoch:
    """One epoch of `Session.epochs`."""

    # Counted from 0.
    number: int
    _session: Any

    def batches(self, loader: Any) -> Iterator[Any]:
        """This rank's batches of the epoch that are not done yet, as `Session.steps` gives them."""
        return self._session.steps(loader, epochs=self.number + 1)
