"""The order of samples in an epoch, cut for however many workers there are. Not for reading samples."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sized
from typing import Any


class ElasticSampler:
    """Gives each sample of an epoch to exactly one rank, also when the number of ranks changes on the way.

    The order of an epoch depends on `seed` and the epoch alone. The group works it off from the front: its position says
    how many samples are behind it, and the ranks take turns at the rest. A group of another size goes on at the position
    that the checkpoint holds.

    It is a sampler for `torch.utils.data.DataLoader`, which takes any iterable with a length.

    When what is left does not divide by the number of ranks, some ranks get one sample fewer than others. Wrap such a
    loop in DDP's `join()`, or pass `drop_last=True`: then up to `world_size - 1` samples of an epoch are left out.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """`dataset` is anything with a length, or the length. Rank and world size are the environment's by default."""
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        self.rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not among {self.world_size} ranks, counted from 0")
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, or goes on with it where `load_state_dict` has left it."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def advance(self, samples: int) -> None:
        """Notes that each rank has trained on `samples` more.

        Not counted while iterating: a DataLoader asks for samples long before they are trained on.
        """
        self.position = min(self.position + samples * self.world_size, self.length)

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint must hold. The same on every rank."""
        return {"epoch": self.epoch, "position": self.position, "length": self.length, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the group was, whatever its size."""
        for name in ("length", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the checkpoint's sampler has {name} {state[name]}, this one {getattr(self, name)}: "
                    "its position means nothing here"
                )
        self.epoch, self.position = state["epoch"], state["position"]

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        if self.shuffle:
            # Text seeds a generator alike in every process and on every machine.
            random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        return iter(order[self.position + self.rank : self._end() : self.world_size])

    def __len__(self) -> int:
        """Samples left for this rank in the epoch."""
        return len(range(self.position + self.rank, self._end(), self.world_size))

    def _end(self) -> int:
        left = self.length - self.position
        return self.length - (left % self.world_size if self.drop_last else 0)
