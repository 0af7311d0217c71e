"""What the ranks tell each other next to the sums of a step: a few numbers, which are summed with the gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# The sums over all ranks. Behind them each rank has a place for its mark.
_SUMS = 6


@dataclass(frozen=True)
class Vote:
    """What one rank tells the others."""

    # Whether it knows that the group changes, and whether it leaves.
    changing: bool = False
    leaving: bool = False
    # Whether its script has left the loop: it gives no gradient any more.
    ended: bool = False
    # How many of what its losses are sums of, such as tokens. 0 if they are means.
    count: float = 0
    # What a learning rate is to follow, if this rank was given it.
    metric: float | None = None
    # A number that has to be the same on all ranks, from 0 to 2**24: a single-precision number can hold these.
    mark: int | torch.Tensor = 0

    def write(self, places: torch.Tensor, rank: int) -> None:
        """Puts it where the sum over the ranks gathers it. A GPU is not waited for."""
        places.zero_()
        metric = self.metric is not None, self.metric or 0
        for place, number in zip(places.unbind(), (self.changing, self.leaving, self.ended, self.count, *metric)):
            if number:
                # An assignment would copy the number from the host, and wait for all that the GPU has to do.
                place.fill_(float(number))
        own = places[_SUMS + rank]
        own.copy_(self.mark) if isinstance(self.mark, torch.Tensor) else own.fill_(float(self.mark))


@dataclass(frozen=True)
class Votes:
    """What all ranks have told: the numbers of ranks that know of a change, that leave, and whose loops have ended; the
    sum of the counts; how many ranks were given a metric, and its sum; and each rank's mark. A rank by itself has no
    marks."""

    changing: int
    leaving: int
    ended: int
    count: float
    metrics: int = 0
    metric: float = 0
    marks: tuple[int, ...] = ()

    @classmethod
    def read(cls, places: torch.Tensor) -> Votes:
        """Of the summed places. Waits for the GPU."""
        changing, leaving, ended, count, metrics, metric, *marks = places.tolist()
        numbers = round(changing), round(leaving), round(ended), count, round(metrics), metric
        return cls(*numbers, tuple(map(round, marks)))

    @classmethod
    def of_one(cls, vote: Vote) -> Votes:
        """Of a group of one rank."""
        metric = vote.metric is not None, vote.metric or 0
        return cls(int(vote.changing), int(vote.leaving), int(vote.ended), vote.count, *metric)


def room(size: int) -> int:
    """The number of places for a group of `size` ranks."""
    return _SUMS + size
