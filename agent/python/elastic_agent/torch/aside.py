"""Keeps a worker's place in the job while its script does something else than steps, however long that takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .. import worker
from .group import Group, GroupLost
from .operations import Errand

# Seconds between two looks at whether the script is back.
_LOOK = 0.1


class Aside:
    """A thread that answers for this worker: to the other ranks that it is still there, and to the agent that it has come
    to rest, if a round is forming."""

    def __init__(
        self,
        group: Group | None,
        next_place: Callable[[str], dict[str, Any]],
        place: dict[str, Any] | None = None,
        limit: float | None = None,
    ) -> None:
        """group: None if it is lost, and this worker has a `place` in a later round already. next_place: comes to rest,
        and returns this worker's place in the next round. Its argument says why. limit: seconds after which this answers
        no more."""
        self._group, self._next_place, self._limit = group, next_place, limit
        self._back, self._given_up = threading.Event(), False
        self._error: Exception | None = None
        # Why the group was lost, and this worker's place in the newest round after it, if there is one yet.
        self.lost: str | None = None if group else "it was left"
        self.place = place
        self._thread = threading.Thread(target=self._answer, name="elastic-session-aside", daemon=True)
        self._thread.start()

    def end(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        """The script is back, and all its state is as it was. Waits for the other ranks, or for this worker's next place,
        and calls `while_waiting` now and then. Raises what the agent refused."""
        self._back.set()
        while self._thread.is_alive():
            while_waiting()
            self._thread.join(_LOOK)
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """The script is not coming back."""
        self._given_up = True
        self._back.set()

    def outcome(self) -> None:
        """Raises GroupLost if the group was."""
        if self.lost is not None:
            raise GroupLost(self.lost)

    def _answer(self) -> None:
        if self._group is not None:
            try:
                self._group.finish_with_all([Errand(lambda: self._back.wait(self._limit))])
                return
            except GroupLost as lost:
                self.lost = str(lost)
            self._group.close()
        try:
            rests = not self._given_up and (self.place is None or self._another_forms())
            while rests:
                self.place = self._next_place(self.lost)
                rests = self._another_forms()
        except Exception as error:  # noqa: BLE001: the script's thread raises it.
            self._error = error

    def _another_forms(self) -> bool:
        """Waits until the script is back, or one more round is forming. Returns whether one is."""
        while not self._back.is_set():
            if worker.forms_within(_LOOK):
                return True
        return False
