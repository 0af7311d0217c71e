"""The random numbers with which a loader's processes change samples: those of a sample follow from the seed, the epoch
and the sample alone, whichever process of whichever rank reads it, and however often.

A loader hands each batch of a sampler to the process that reads it, which then takes the samples one by one. So a batch
that sets the numbers before it gives each sample needs nothing of the dataset or the loader. It takes its seed along: it
may be that of a state which came after the loader's processes had started.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

# NumPy's generator while a batch is read in this process.
_other: Any = None


class Batch(list):
    """The samples of a batch. Before it gives one, it seeds the random numbers of its process: torch's, Python's, and
    NumPy's if that is imported. What reads or joins a whole batch has the numbers of its first sample."""

    def __init__(self, samples: list[int], seed: str) -> None:
        super().__init__(samples)
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        for sample in super().__iter__():
            set_to(f"{self.seed} {sample}")
            yield sample
        self._set_to_whole()

    def __reduce__(self) -> Any:
        return _arrived, (self[:], self.seed)

    def _set_to_whole(self) -> None:
        set_to(f"{self.seed} batch {self[0]}")


def _arrived(samples: list[int], seed: str) -> Batch:
    """The batch, in the process that reads it next: by itself not always sample by sample."""
    batch = Batch(samples, seed)
    batch._set_to_whole()
    return batch


def set_to(what: str) -> None:
    """Seeds this process's random numbers, for loaders."""
    number = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little")
    # torch.manual_seed takes a tenth of a millisecond for devices, which a loader does not use.
    torch.default_generator.manual_seed(number >> 1)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number & 0xFFFFFFFF)


@contextlib.contextmanager
def kept(loader: Any, what: str) -> Iterator[None]:
    """While a batch is read. A loader without processes reads it in this one: Python's and NumPy's numbers are then as
    before. what: names the batch."""
    if getattr(loader, "num_workers", 0):
        yield
        return
    state, restore = random.getstate(), _numpy_apart(sys.modules.get("numpy"))
    set_to(what)
    try:
        yield
    finally:
        random.setstate(state)
        restore()


def _numpy_apart(numpy: Any) -> Callable[[], None]:
    """Gives NumPy other random numbers. Returns what restores its own."""
    global _other
    if numpy is None:
        return lambda: None
    if not hasattr(numpy.random, "set_bit_generator"):
        # NumPy before 1.24. It takes a tenth of a millisecond.
        state = numpy.random.get_state()
        return lambda: numpy.random.set_state(state)
    _other = _other or numpy.random.MT19937(0)
    own = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(_other)
    return lambda: numpy.random.set_bit_generator(own)
