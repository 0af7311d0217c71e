"""The batches of a job whose number of workers changes: each step's batch has one size for the whole group, and the ranks
divide it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from . import order


class ElasticBatchSampler:
    """Divides every epoch into global batches, and each of those among the ranks, however many there are.

    A step trains on `global_batch` samples, whatever the number of ranks: so the learning rate need not change with it.
    The order of an epoch depends only on `seed` and the epoch, and the position only on the number of steps. So a group
    of any size continues where another stopped, and each sample belongs to exactly one step of an epoch. The order is
    computed sample by sample, in two millionths of a second each: no list of all samples is made.

    It is a batch sampler for `torch.utils.data.DataLoader(dataset, batch_sampler=...)`: it yields the places of the
    samples of this rank's part of each step, in batches of at most `micro_batch`, from the current position to the end of
    the epoch. `elastic_agent.torch.Session` sets its place and moves it on.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        *,
        micro_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """`dataset` is anything with a length, or the length.

        A rank that has more than `micro_batch` samples of a step gets them in several batches, whose gradients add up, so
        that a smaller group needs no more memory. With `drop_last` the samples that do not fill a last global batch are
        left out of the epoch.
        """
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        if global_batch < 1 or (micro_batch is not None and micro_batch < 1):
            raise ValueError("global_batch and micro_batch count samples: they are 1 or more")
        if self.length < (global_batch if drop_last else 1):
            raise ValueError(f"a dataset of {self.length} samples does not fill a batch of {global_batch}")
        self.global_batch = global_batch
        self.micro_batch = micro_batch or global_batch
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        # Samples of the epoch that earlier steps have used.
        self.position = 0
        self._way = order.COMPUTED
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))

    def set_place(self, rank: int, world_size: int) -> None:
        """Takes this rank's part of each step from here on."""
        self.rank, self.world_size = rank, world_size

    def step_size(self) -> int:
        """The number of samples of the step at the position, in the whole group."""
        return min(self.global_batch, self._end() - self.position)

    def micro_batches(self) -> list[int]:
        """The sizes of this rank's batches of the step at the position. None at all, if other ranks have all samples."""
        return [len(batch) for batch in self._share(self.position)]

    def advance(self) -> None:
        """The step at the position is done. After the last of an epoch, the next epoch begins."""
        self.position += self.step_size()
        if self.position >= self._end():
            self.epoch, self.position, self._way = self.epoch + 1, 0, order.COMPUTED

    def state_dict(self) -> dict[str, int]:
        """The state that a checkpoint must hold. It is the same on every rank."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "length": self.length,
            "seed": self.seed,
            "global_batch": self.global_batch,
            "order": self._way,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where a group was, whatever its size."""
        for name in ("length", "seed", "global_batch"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the checkpoint was made with {name} {state[name]}, this sampler has {getattr(self, name)}: "
                    "it would repeat some samples and skip others"
                )
        way = order.way_of(state)
        self.epoch, self.position, self._way = state["epoch"], state["position"], way

    def __iter__(self) -> Iterator[list[int]]:
        samples = range(self.length)
        if self.shuffle:
            samples = order.of_epoch(self.length, self.seed, self.epoch, self._way)
        for position in range(self.position, self._end(), self.global_batch):
            for places in self._share(position):
                yield [samples[place] for place in places]

    def __len__(self) -> int:
        """The number of batches that are left for this rank in the epoch."""
        full, rest = divmod(self._end() - self.position, self.global_batch)
        batches = full * len(self._share(self.position)) if full else 0
        return batches + (len(self._share(self._end() - rest)) if rest else 0)

    def _end(self) -> int:
        return self.length - self.length % self.global_batch if self.drop_last else self.length

    def _share(self, position: int) -> list[range]:
        """This rank's places in the step at `position`, cut into micro-batches. Shares differ by one sample at most."""
        size = min(self.global_batch, self._end() - position)
        first = position + size * self.rank // self.world_size
        end = position + size * (self.rank + 1) // self.world_size
        return [range(at, min(at + self.micro_batch, end)) for at in range(first, end, self.micro_batch)]
