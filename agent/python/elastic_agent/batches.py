"""The batches of a job whose number of workers changes: each step's batch has one size for the whole group, which the
ranks divide, or one for each rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

from . import order
from .shards import Shards


class ElasticBatchSampler:
    """Divides every epoch into global batches, and each of these among any number of ranks.

    A step trains on `global_batch` samples for any number of ranks, or on `rank_batch` samples for each rank. The order
    of an epoch depends only on `seed` and the epoch, and the position only on the number of steps: a group of any size
    continues where another stopped, and each sample belongs to exactly one step of an epoch. The order is computed sample
    by sample, in two microseconds each, without a list of all samples.

    It is a batch sampler for `torch.utils.data.DataLoader(dataset, batch_sampler=...)`: it yields the samples of this
    rank's part of each step, in batches of at most `micro_batch`, from the current position to the end of the epoch.
    `elastic_agent.torch.Session` sets its place and advances it.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch: int | None = None,
        *,
        rank_batch: int | None = None,
        micro_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """dataset: anything with a length, or the length; `Shards` are read shard by shard.
        global_batch or rank_batch: the samples of a step, in the whole group or on each rank. With `rank_batch` the
        learning rate should follow the group: `Session(on_group=...)`.
        micro_batch: a rank gets more samples of a step in several batches, whose gradients add up: a smaller group needs
        no more memory.
        drop_last: leaves out the samples that do not fill a last global batch.
        """
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        if (global_batch is None) == (rank_batch is None):
            raise ValueError(
                "give global_batch, the samples of a step in the whole group, or rank_batch, those of each rank"
            )
        if any(batch is not None and batch < 1 for batch in (global_batch, rank_batch, micro_batch)):
            raise ValueError("global_batch, rank_batch and micro_batch count samples: they are 1 or more")
        if rank_batch is not None and drop_last:
            raise ValueError("drop_last needs global_batch: with rank_batch, what a full step is changes with the group")
        if rank_batch is not None and isinstance(dataset, Shards):
            raise ValueError(
                "shards need global_batch: with rank_batch, who reads which shard would change with the group"
            )
        if self.length < (global_batch or 1 if drop_last else 1):
            raise ValueError(f"a dataset of {self.length} samples does not fill a batch of {global_batch}")
        self._fixed, self.rank_batch = global_batch, rank_batch
        self.micro_batch = micro_batch or global_batch or rank_batch or 1
        self._shards = dataset if isinstance(dataset, Shards) else None
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        # `Session` sets these: whether all ranks have as many batches of a step, because they compute together; and
        # whether batches are cut from the whole step, not from each rank's part, for `same_bits`.
        self.alike = self.in_pieces = False
        # So many ranks in a row have as many of these batches in each step.
        self.in_a_row = 1
        # The fewest samples of a batch, if its step has so many: BatchNorm needs two.
        self.least = 1
        # What makes a batch of its samples.
        self.batch_of: Callable[[list[int]], list[int]] | None = None
        self.epoch = 0
        # Samples of the epoch that earlier steps have used.
        self.position = 0
        self.set_place(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))

    @property
    def global_batch(self) -> int:
        """The number of samples of a full step in the whole group."""
        return self._fixed or (self.rank_batch or 1) * self.world_size

    def facts(self) -> dict[str, int]:
        """What must be the same wherever this sampler's state is loaded, or samples would be repeated and left out."""
        given = {"length": self.length, "seed": self.seed, "global_batch": self._fixed, "rank_batch": self.rank_batch}
        return {name: value for name, value in given.items() if value is not None}

    def set_place(self, rank: int, world_size: int, absent: Collection[int] = ()) -> None:
        """From the next step, takes this rank's part of each step. absent: the ranks that have no part in the next one.
        With `rank_batch` all have."""
        self.rank, self.world_size = self._next = rank, world_size
        if absent and self._fixed:
            present = [one for one in range(world_size) if one not in absent]
            # This rank's number among those that have a part of the next step, and how many these are.
            self._next = (present.index(rank), len(present)) if rank in present else (0, 0)

    def step_size(self) -> int:
        """The number of samples of the step at the position, in the whole group."""
        return min(self.global_batch, self._end() - self.position)

    def micro_batches(self) -> list[int]:
        """The sizes of this rank's batches of the step at the position. A batch of size 0 only keeps step with ranks that
        have more: what it yields does not count."""
        return [len(batch) for batch in self._share(self.position, *self._next)]

    def last_step(self) -> int | None:
        """The number of samples of an epoch's last step. None if that follows from the number of ranks."""
        if self._fixed is None:
            return None
        rest = 0 if self.drop_last else self.length % self._fixed
        return rest or self._fixed

    def first_place(self) -> int:
        """Where this rank's part of the step at the position begins, among the step's samples."""
        return self._part(self.step_size(), *self._next)[0]

    def advance(self) -> None:
        """The step at the position is done. After the last of an epoch, the next epoch begins."""
        self.position += self.step_size()
        self._next = self.rank, self.world_size
        if self.position >= self._end():
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The state that a checkpoint must hold. It is the same on every rank."""
        return {"epoch": self.epoch, "position": self.position, **self.facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where a group was, whatever its size."""
        facts = self.facts()
        for name in ("length", "seed", "global_batch", "rank_batch"):
            was, here = state.get(name, "not given"), facts.get(name, "not given")
            if was != here:
                raise ValueError(
                    f"the checkpoint was made with {name} {was}, this sampler has {here}: "
                    "it would repeat some samples and skip others"
                )
        self.epoch, self.position = state["epoch"], state["position"]

    def close(self) -> None:
        """The session has ended."""
        self.batch_of = None

    def __iter__(self) -> Iterator[list[int]]:
        samples: Any = range(self.length)
        if self._shards is not None:
            samples = self._shards.order(self.global_batch, self.seed, self.epoch if self.shuffle else None)
        elif self.shuffle:
            samples = order.of_epoch(self.length, self.seed, self.epoch)
        place = self._next
        for position in range(self.position, self._end(), self.global_batch):
            share, place = self._share(position, *place), (self.rank, self.world_size)
            for places in share:
                few = range(position, min(position + self.least, self._end()))
                batch = [samples[place] for place in places or few]
                yield self.batch_of(batch) if self.batch_of else batch

    def __len__(self) -> int:
        """The number of batches that are left for this rank in the epoch."""
        place = self.rank, self.world_size
        full, rest = divmod(self._end() - self.position, self.global_batch)
        batches = full * len(self._share(self.position, *place)) if full else 0
        batches += len(self._share(self._end() - rest, *place)) if rest else 0
        return batches + len(self._share(self.position, *self._next)) - len(self._share(self.position, *place))

    def _end(self) -> int:
        return self.length - self.length % self.global_batch if self.drop_last else self.length

    def _share(self, position: int, rank: int, ranks: int) -> list[range]:
        """The places of the rank of this number in the step at `position`, cut into micro-batches."""
        size = min(self.global_batch, self._end() - position)
        first, end = (position + place for place in self._part(size, rank, ranks))
        if not self.alike:
            # What a loop does between `backward` and `step`, such as to clip gradients, all ranks must do.
            if first == end:
                return [range(first, end)]
            begins = list(range(first, end, self.micro_batch))
            if len(begins) > 1 and end - begins[-1] < self.least:
                begins.pop()
            return [range(at, until) for at, until in zip(begins, [*begins[1:], end])]
        count = -(-size // (self.world_size * self.micro_batch))
        cuts = [first + (end - first) * number // count for number in range(count + 1)]
        if self.in_pieces:
            cuts = [min(first + number * self.micro_batch, end) for number in range(count + 1)]
        return [range(at, until) for at, until in zip(cuts, cuts[1:])]

    def _part(self, size: int, rank: int, ranks: int) -> tuple[int, int]:
        """Where a rank's part of a step of `size` samples begins and ends. Parts differ by one unit at most: a sample,
        the fewest of a batch, or a micro-batch. No part begins and ends at 0."""
        if not ranks:
            return 0, 0
        unit = self.micro_batch * self.in_a_row if self.in_pieces else self.least
        # Only a micro-batch may be smaller than a unit.
        units = -(-size // unit) if self.in_pieces else max(size // unit, 1)
        row, place = divmod(rank, self.in_a_row)
        first, end = (units * one * self.in_a_row // ranks for one in (row, row + 1))
        if self.in_a_row > 1:
            each = self.micro_batch * (end - first)
            return unit * first + each * place, unit * first + each * (place + 1)
        return unit * first, size if end == units else unit * end
