"""A dataset in shards that can only be read from their beginnings, such as tar files: read in long runs by each rank,
however many ranks there are."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from . import order

# Shards that are read side by side in one epoch. More of them mix better and need more open files.
_LANES = 256


class Shards:
    """Samples in shards, for `ElasticBatchSampler` and a DataLoader.

    ::

        shards = Shards(paths, lengths, open=lambda path: iter(webdataset.WebDataset(path)))
        sampler = ElasticBatchSampler(shards, global_batch=256)
        loader = DataLoader(shards, batch_sampler=sampler, num_workers=2)

    Each epoch puts the shards in an order of its own, end to end, and cuts them into lanes of one length. Each step takes
    as many samples from each lane. A rank keeps its lanes while the group does not change, and reads their shards from
    the beginning, in parallel; after a change it skips to its new lanes. The samples of a step depend on its number only.

    Samples are not mixed within a shard: write them shuffled. A process of a DataLoader skips the samples of the batches
    that others load.
    """

    def __init__(self, shards: Sequence[Any], lengths: Sequence[int], open: Callable[[Any], Iterable[Any]]) -> None:
        """shards: what `open` takes. lengths: how many samples each has: a shard that ends sooner is an error. open: the
        samples of a shard, from the first; an iterator that has `close` is closed after use."""
        if len(shards) != len(lengths):
            raise ValueError(f"there are {len(shards)} shards and {len(lengths)} lengths: give one for each")
        for shard, length in zip(shards, lengths):
            if length < 0:
                raise ValueError(f"{shard} has {length} samples: a length is 0 or more")
        self._shards, self._lengths, self._open = list(shards), list(lengths), open
        self._ends = list(itertools.accumulate(self._lengths))
        # Open shards: how many samples were read of each, and what reads it. The one used last is at the end.
        self._readers: dict[tuple[int, int], Iterator[Any]] = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, sample: int) -> Any:
        """The sample of this number, counted through all shards. It reads its shard up to the sample, unless the one
        before was read last."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} is not below {len(self)}")
        shard = bisect.bisect_right(self._ends, sample)
        wanted = sample - (self._ends[shard] - self._lengths[shard])
        read, reader = self._reader(shard, wanted)
        found = next(itertools.islice(reader, wanted - read, None), self)
        if found is self:
            raise ValueError(
                f"{self._shards[shard]} ends before sample {wanted}, and {self._lengths[shard]} were announced"
            )
        if wanted + 1 < self._lengths[shard]:
            self._readers[shard, wanted + 1] = reader
        else:
            _close(reader)
        while len(self._readers) > _LANES:
            _close(self._readers.pop(next(iter(self._readers))))
        return found

    def order(self, global_batch: int, seed: int, epoch: int | None) -> Sequence[int]:
        """The samples of an epoch, in its order; without an epoch, with the shards in the given order."""
        turn: Sequence[int] = range(len(self._shards))
        if epoch is not None:
            turn = order.Permutation(len(self._shards), f"{seed} {epoch}")
        return _Laned(self._ends, self._lengths, turn, global_batch)

    def _reader(self, shard: int, wanted: int) -> tuple[int, Iterator[Any]]:
        """What can read that sample soonest, and how far it has read."""
        follows = self._readers.pop((shard, wanted), None)
        if follows is not None:
            return wanted, follows
        behind = [read for of, read in self._readers if of == shard and read <= wanted]
        if behind:
            return max(behind), self._readers.pop((shard, max(behind)))
        return 0, iter(self._open(self._shards[shard]))

    def __getstate__(self) -> dict[str, Any]:
        # A process of a DataLoader opens its own.
        return {**self.__dict__, "_readers": {}}


def lanes_of(global_batch: int) -> int:
    """The most lanes, up to a limit, such that each step takes the same number of samples from each lane."""
    return max(lanes for lanes in range(1, min(global_batch, _LANES) + 1) if global_batch % lanes == 0)


class _Laned(Sequence[int]):
    """Shards in turn, end to end, cut into lanes: the place in the epoch, to the sample's number."""

    def __init__(self, ends: list[int], lengths: list[int], turn: Sequence[int], step: int) -> None:
        self._first = [ends[shard] - lengths[shard] for shard in turn]
        self._starts = [0, *itertools.accumulate(lengths[shard] for shard in turn)]
        self._length, lanes = self._starts[-1], lanes_of(step)
        # The first lanes are longer by one, where the lengths do not fit.
        self._least, self._longer = divmod(self._length, lanes)
        self._step, self._run = step, step // lanes
        self._full = self._least // self._run

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> int:  # type: ignore[override]  # A slice would be a list.
        steps, within = divmod(place, self._step)
        if steps < self._full:
            lane, along = divmod(within, self._run)
            along += steps * self._run
        else:
            # What is left of each lane, one lane after the other.
            done = self._full * self._run
            place, left = place - self._full * self._step, self._least - done
            longer = self._longer * (left + 1)
            if place < longer:
                lane, along = divmod(place, left + 1)
            else:
                lane, along = divmod(place - longer, left)
                lane += self._longer
            along += done
        at = lane * self._least + min(lane, self._longer) + along
        turn = bisect.bisect_right(self._starts, at) - 1
        return self._first[turn] + at - self._starts[turn]


def _close(reader: Iterator[Any]) -> None:
    close = getattr(reader, "close", None)
    if close is not None:
        close()
