"""The order of samples in an epoch, divided among any number of workers. Reading the samples is left to others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from typing import Any

from . import order


class ElasticSampler:
    """Gives each sample of an epoch to exactly one rank, even if the number of ranks changes during the epoch.

    The order of an epoch depends only on `seed` and the epoch. The position is the number of samples that are done, and
    the ranks take turns with the rest: a group of another size continues at the position that the checkpoint holds. The
    order is computed sample by sample, in two microseconds each, without a list of all samples.

    It is a sampler for `torch.utils.data.DataLoader`. If the rest cannot be divided by the number of ranks, some ranks
    get one sample fewer: wrap the loop in DDP's `join()`, or pass `drop_last=True`, which leaves out up to
    `world_size - 1` samples of an epoch.
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
        """`dataset` is anything with a length, or the length. Rank and world size default to the environment's."""
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        self.set_place(
            int(os.environ.get("RANK", 0)) if rank is None else rank,
            int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size,
        )
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0

    def set_place(self, rank: int, world_size: int) -> None:
        """Switches to another part of the epoch: after `elastic_agent.quiesce`, in a script that keeps its process."""
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not among {world_size} ranks, counted from 0")
        self.rank, self.world_size = rank, world_size

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch. If it is the loaded epoch, continues at the position that `load_state_dict` has set."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def advance(self, samples: int) -> None:
        """Records that each rank has trained on this many more samples. A DataLoader reads them long before."""
        self.position = min(self.position + samples * self.world_size, self.length)

    def state_dict(self) -> dict[str, int]:
        """The state that a checkpoint must hold. It is the same on every rank."""
        return {"epoch": self.epoch, "position": self.position, "length": self.length, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the group was, whatever size the group had."""
        for name in ("length", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the checkpoint's sampler has {name} {state[name]}, this one {getattr(self, name)}: "
                    "its position means nothing here"
                )
        self.epoch, self.position = state["epoch"], state["position"]

    def __iter__(self) -> Iterator[int]:
        places = range(self.position + self.rank, self._end(), self.world_size)
        if not self.shuffle:
            return iter(places)
        samples = order.of_epoch(self.length, self.seed, self.epoch)
        return (samples[place] for place in places)

    def __len__(self) -> int:
        """The number of samples that are left for this rank in the epoch."""
        return len(range(self.position + self.rank, self._end(), self.world_size))

    def _end(self) -> int:
        left = self.length - self.position
        return self.length - (left % self.world_size if self.drop_last else 0)


class ElasticDistributedSampler(ElasticSampler):
    """`torch.distributed.elastic.utils.data.ElasticDistributedSampler` by its name and arguments. Every rank gets the
    same number of samples: some may be used twice at the end.

    TorchElastic shuffles what is left after `start_index` again: some samples of the epoch come again, others never. Here
    `start_index` is a position in one order.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        start_index: int = 0,
    ) -> None:
        """start_index: how many samples of the epoch the group has used: of the first epoch that is named to
        `set_epoch`, or of epoch 0. Later epochs begin at their first sample."""
        super().__init__(dataset, rank=rank, world_size=num_replicas)
        if not 0 <= start_index < self.length:
            raise ValueError(f"start_index {start_index} is not below the dataset's size of {self.length}")
        self.position = start_index
        self._named = False

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch. The first that is named continues at `start_index`, or where `load_state_dict` has said."""
        if self._named:
            super().set_epoch(epoch)
        else:
            self.epoch, self._named = epoch, True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the group was, whatever size the group had."""
        super().load_state_dict(state)
        self._named = True

    def __iter__(self) -> Iterator[int]:
        samples = order.of_epoch(self.length, self.seed, self.epoch)
        # Where it is now: `advance` moves on while samples are read.
        first, left = self.position, self.length - self.position
        # Beyond the end the first of what is left come again.
        places = range(self.rank, self.rank + len(self) * self.world_size, self.world_size)
        return (samples[first + place % left] for place in places)

    def __len__(self) -> int:
        """The number of samples that are left for each rank in the epoch."""
        return -(-(self.length - self.position) // self.world_size)
