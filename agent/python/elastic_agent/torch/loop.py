"""What every training loop that survives changes of its group has: this worker's place, the way from one group to the
next, and the end. The steps of a session are in session.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

from .. import worker
from . import sessions, tree
from .disk import Disk
from .group import Group, GroupLost
from .membership import Membership
from .replica import Replica
from .state import Training
from .step import Step

_Kind = TypeVar("_Kind", bound="Elastic")


class Elastic:
    """A loop whose ranks come and go."""

    def __init__(
        self,
        training: Training,
        replica: Replica,
        disk: Disk,
        members: Membership,
        on_group: Callable[[Any], None] | None,
        name: str,
    ) -> None:
        self._training, self._replica, self._disk, self._members = training, replica, disk, members
        self._on_group, self._name = on_group, name
        self._step = Step([])

    @property
    def step_number(self) -> int:
        """The number of steps that are done."""
        return self._training.step_number

    @property
    def rank(self) -> int:
        """This worker's rank in the round under way."""
        return self._members.place["rank"]

    @property
    def world_size(self) -> int:
        """The number of ranks in the round under way."""
        return self._members.place["world_size"]

    def __enter__(self: _Kind) -> _Kind:
        self._which = sessions.enter(self._name)
        self._members.departure.begin()
        try:
            self._members.enter_first(self._which)
        except BaseException:
            # SIGTERM, perhaps: the end of this process must not wait for the group.
            self._members.leave_group()
            raise
        # Not when the first newcomer is to get it, or the first checkpoint is read.
        tree.take_apart(self._training.value())
        self._tell_group()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError):
            self._replica.end_with_the_others(error)
        try:
            if kind is None:
                self._finish_together()
                if worker.available():
                    self._which.complete(self._training.result())
        finally:
            self._members.leave_group()
            self._disk.close(forget=kind is None)
            self._release()
            self._members.departure.end()

    def aside(self) -> AbstractContextManager[None]:
        """Around what a script does between two steps and that takes long, such as an evaluation or a test: rounds form
        meanwhile, and no other rank takes this one for lost.

        ::

            with session.aside():
                accuracy = evaluate(model)

        Every rank enters it after the same step; what is done inside may be another on each. It changes nothing that a
        step changes. At its end all ranks wait for each other.
        """
        return self._aside()

    @contextlib.contextmanager
    def _aside(
        self, agree: Callable[[Group], None] | None = None, alone: Callable[[], None] | None = None
    ) -> Iterator[None]:
        self._close_loop()
        if self._step.lost is None and self._step.done < len(self._step.batches):
            raise RuntimeError("session.aside is for what is done between two steps, after session.step")
        group, entered = self._members.group, time.monotonic()
        with self._members.aside(agree, alone):
            yield
        self._step.began += time.monotonic() - entered
        if self._members.group is not group:
            self._clear()
            self._step = Step([], moved=True)
            self._tell_group()

    def _close_loop(self) -> None:
        """Called before what all ranks do between two steps."""

    def _clear(self) -> None:
        """Forgets what is left of a step."""

    def _release(self) -> None:
        """The loop has ended: undoes what it has fastened to the script's objects."""

    def _changes(self) -> bool:
        """After a step: enters the next group if this one changes. Returns whether it did."""
        self._step.settled = True
        lost, (changing, leaving) = self._step.lost, self._step.votes
        if self._step.moved:
            return True
        if lost is None:
            if leaving == 0 and changing == 0:
                lost = self._save_together() if self._disk.due() else None
                if lost is None:
                    return False
            elif leaving and (save := self._disk.save(self._members.place)):
                # The others may be asked to leave in the next moment, and then no worker has the state.
                save()
            if self._members.departure.asked:
                self._members.departure.leave()
        self._next_group(lost)
        return True

    def _next_group(self, lost: str | None) -> None:
        self._members.leave_group()
        self._clear()
        self._members.enter_next(lost)
        self._tell_group()

    def _tell_group(self) -> None:
        if self._on_group is not None:
            self._on_group(self)

    def _save_together(self) -> str | None:
        """Has rank 0 write a checkpoint, however long that takes. Returns why the group was lost, if it was."""
        save = self._disk.save(self._members.place)
        try:
            self._replica.together(lambda: self._members.while_others_wait(save))
        except GroupLost as lost:
            return str(lost)
        return None

    def _finish_together(self) -> None:
        """The last step is done on all ranks, and saved. A worker that starts later has no more to do then."""
        self._close_loop()
        while True:
            try:
                self._replica.together(self._members.meet_at_the_end)
                why = self._save_together()
            except GroupLost as lost:
                why = str(lost)
            if why is None:
                return
            self._next_group(why)
