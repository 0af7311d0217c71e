"""Tells ranks that wait for another whether it is slow or gone: each gives signs of life at the store where they met."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

# Signs of life that a rank gives in the time after which others give it up, and the most seconds between two.
_SIGNS, _EVERY = 6, 5.0

# A rank that lives may take so many times as long.
SLOW = 10


class Pulse:
    """A thread that gives this rank's signs of life, and hears those of others while it is waited for them."""

    def __init__(self, store: Callable[[], Any], rank: int, size: int, timeout: float) -> None:
        """store: connects to the ranks' own store. timeout: seconds after which a rank without a sign is given up."""
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._ended, self._asked = threading.Event(), False
        # Of each other rank its newest sign, and when it came.
        self._heard: dict[int, tuple[int, float]] = {}
        threading.Thread(target=self._beat, name="elastic-session-pulse", daemon=True).start()

    def end(self) -> None:
        """This rank leaves the group."""
        self._ended.set()

    def gives_up(self, waited: float) -> str | None:
        """Why it is no use to wait on, after so many seconds. None if it may be."""
        self._asked = waited > self._timeout / 3
        if waited < self._timeout:
            return None
        if waited > SLOW * self._timeout:
            return f"the ranks have waited {waited:.0f} s for one that lives"
        since, heard = time.monotonic() - self._timeout / 2, dict(self._heard)
        others = (rank for rank in range(self._size) if rank != self._rank)
        silent = next((rank for rank in others if heard.get(rank, (0, -1.0))[1] < since), None)
        return None if silent is None else f"rank {silent} has given no sign of life for {self._timeout:.0f} s"

    def _beat(self) -> None:
        store = None
        while not self._ended.wait(min(self._timeout / _SIGNS, _EVERY)):
            try:
                store = store or self._store()
                store.add(f"alive/{self._rank}", 1)
                for rank in range(self._size if self._asked else 0):
                    sign = store.add(f"alive/{rank}", 0)
                    if rank != self._rank and self._heard.get(rank, (-1, 0))[0] != sign:
                        self._heard[rank] = sign, time.monotonic()
            except RuntimeError:
                # Its agent is gone, and a round forms; or it does not answer.
                store = None
            if not self._asked:
                self._heard.clear()
