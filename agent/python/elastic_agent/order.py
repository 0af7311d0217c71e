"""The order of an epoch's samples. Who reads which of them is left to the samplers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

# Four rounds are enough where the functions are random (Luby and Rackoff, 1988). Ours are hashes, and lengths are small.
_ROUNDS = 8
_MASK = (1 << 64) - 1


def of_epoch(length: int, seed: int, epoch: int) -> Sequence[int]:
    """The places of an epoch's samples, in its order. It is the same in every process and on every machine."""
    return Permutation(length, f"{seed} {epoch}")


class Permutation(Sequence[int]):
    """A pseudorandom order of the numbers from 0 to `length - 1`, computed place by place: it needs no memory for them.

    It is the generalised Feistel cipher with cycle walking of J. Black and P. Rogaway, "Ciphers with Arbitrary Finite
    Domains" (CT-RSA 2002). A place is two digits, below `a` and `b`. In turns a hash of one is added to the other: that
    can be undone, so no two places give the same number. `a * b` is `length` or a little more; a result beyond `length`
    goes through it again. The order is no secret.
    """

    def __init__(self, length: int, key: str) -> None:
        self.length = length
        self._a = math.isqrt(max(length - 1, 0)) + 1
        self._b = -(-length // self._a)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
        keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8)]
        self._keys = list(zip(keys[::2], keys[1::2]))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> int:  # type: ignore[override]  # A slice would be a list.
        """The number at this place."""
        if not 0 <= place < self.length:
            raise IndexError(f"place {place} is not below {self.length}")
        a, b = self._a, self._b
        while True:
            high, low = divmod(place, a)
            for first, second in self._keys:
                # Both hashes are the last steps of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom
                # Number Generators", 2014), written out: a call for each would double the time.
                mixed = high ^ first
                mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
                mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
                low = (low + (mixed ^ mixed >> 31)) % a
                mixed = low ^ second
                mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
                mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
                high = (high + (mixed ^ mixed >> 31)) % b
            place = high * a + low
            if place < self.length:
                return place
