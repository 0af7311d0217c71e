"""Operations of gloo that are under way, as something that can be waited for a while, and be left to itself."""

from __future__ import annotations

import datetime
import threading
from typing import Any


class Collective:
    """A sum or a broadcast."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def ends_within(self, seconds: float) -> bool:
        """Waits for its end, for so many seconds at most. Whether it came. Raises RuntimeError if it has failed."""
        try:
            self._work.wait(datetime.timedelta(seconds=seconds))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            # It may have come since.
            self._work.wait()
        return True

    def outlast(self) -> None:
        """Waits until nothing of it is left, however long that takes."""
        try:
            self._work.wait()
        except RuntimeError:
            pass


class Passage:
    """A tensor on its way from one rank to another. gloo has no wait for these but one that ends all others of the
    group if it is too short: so a thread waits."""

    def __init__(self, work: Any) -> None:
        self._over, self._error = threading.Event(), ""
        threading.Thread(target=self._wait, args=(work,), name="elastic-session-passage", daemon=True).start()

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            # Not the error itself, whose frames would keep the connections.
            self._error = str(error)
        self._over.set()

    def ends_within(self, seconds: float) -> bool:
        """Waits for its end, for so many seconds at most. Whether it came. Raises RuntimeError if it has failed."""
        if self._over.wait(seconds) and self._error:
            raise RuntimeError(self._error)
        return self._over.is_set()

    def outlast(self) -> None:
        """Waits until nothing of it is left, however long that takes."""
        self._over.wait()


def hold_until_over(held: Any, operations: list[Collective | Passage]) -> None:
    """Keeps `held`, in a thread of its own, until these operations are over: to free it would wait for them."""

    def wait(held: Any) -> None:
        for one in operations:
            one.outlast()

    threading.Thread(target=wait, args=(held,), name="elastic-session-abandoned", daemon=True).start()
