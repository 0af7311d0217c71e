"""Operations of gloo that are under way: each can be waited for a while, and be given up without a wait."""

from __future__ import annotations

import datetime
import threading
from typing import Any


class Collective:
    """A sum or a broadcast. `over` becomes true when it has ended, well or not."""

    def __init__(self, work: Any) -> None:
        self._work, self.over = work, False

    def ends_within(self, seconds: float) -> bool:
        """Waits for its end, up to `seconds`. Returns whether it ended. Raises RuntimeError if it failed."""
        try:
            self._work.wait(datetime.timedelta(seconds=seconds))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self.over = True
            # It may have ended well since.
            self._work.wait()
        self.over = True
        return True

    def give_up(self) -> Any:
        """Hands over gloo's part. To free it may wait for the end of the operation."""
        self.over = self.over or self._work.is_completed()
        work, self._work = self._work, None
        return work


class Passage:
    """A tensor on its way from one rank to another. A wait with a timeout would end all other operations of the group:
    so a thread waits, and owns gloo's part."""

    def __init__(self, work: Any) -> None:
        self._ended, self._error = threading.Event(), ""
        threading.Thread(target=self._wait, args=([work],), name="elastic-session-passage", daemon=True).start()

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def _wait(self, held: list[Any]) -> None:
        try:
            held[0].wait()
        except RuntimeError as error:
            # Not the error itself: its frames would keep the connections.
            self._error = str(error)
        held.clear()
        self._ended.set()

    def ends_within(self, seconds: float) -> bool:
        """Waits for its end, up to `seconds`. Returns whether it ended. Raises RuntimeError if it failed."""
        if self._ended.wait(seconds) and self._error:
            raise RuntimeError(self._error)
        return self._ended.is_set()

    def give_up(self) -> None:
        """Its thread frees gloo's part."""


def free_later(held: list[Any]) -> None:
    """Frees what a list holds, in a thread of its own: gloo waits for all operations under way until their timeout. The
    caller keeps no other reference to it."""
    threading.Thread(target=held.clear, name="elastic-session-free", daemon=True).start()
