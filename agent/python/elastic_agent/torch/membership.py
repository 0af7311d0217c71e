"""The rounds of a session: this worker's place in each, its group, one state for all ranks, and the way out.

    STARTING ──▶ IN_GROUP ──▶ BETWEEN ──▶ IN_GROUP …
                     │           │ a signal to leave: after the step, or while no step runs
                     └───────────┴──▶ LEAVING
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from .. import worker
from . import checkpoints, heal, sessions, state
from .aside import Aside
from .choice import Offer, choose
from .departure import Departure, Phase
from .disk import Disk
from .feed import Feeds
from .group import Group, GroupLost
from .keeper import say
from .nccl import Nccl
from .operations import Errand
from .pulse import SLOW
from .replica import Replica
from .state import Progress

# Seconds to wait for a worker that may bring the newest state back.
_RETURN = 60.0


class _Told(NamedTuple):
    """What a rank tells the others of a new group."""

    # Its session.
    word: int
    # How many steps its state has done, -1 if it has none; and the furthest that it knows of.
    step: int
    known: int
    # Whether its script does what follows the loop next.
    loop_ends: bool
    # By what number another rank has fed it, or 0; and the newcomers that it has fed.
    follows: int
    feeds: list[int]


class Membership:
    """This worker among the ranks of the job."""

    def __init__(
        self, training: Progress, disk: Disk, replica: Replica, nccl: Nccl, timeouts: tuple[float, float]
    ) -> None:
        """timeouts: seconds for an operation between ranks, and to wait for a round after a group is broken."""
        self._training, self._disk, self._replica, self._nccl = training, disk, replica, nccl
        self._operation_timeout, self._loss_timeout = timeouts
        self.group: Group | None = None
        self.place: dict[str, Any] = {}
        self.departure = Departure()
        self.longest_step = 0.0
        # The step of the furthest state that this rank knows of. Perhaps no rank has it any more.
        self._known = 0
        # The newcomers to whom this rank gives a state before they have a place.
        self.feeds = Feeds(training, self._operation_timeout)
        # What has given this worker a state before it had a place, and the step of an older one that is not loaded.
        self._healing: heal.Healing | None = None
        self._left: int | None = None
        # The session, and whether the other ranks have completed it before this one came.
        self._which = sessions.Which(0, "")
        self.completed = False
        # What answers for this rank in the first step of a group, and the place that it has come to.
        self._slow: Aside | None = None
        self._taken: dict[str, Any] | None = None
        self._all_are_there = False
        # Whether the script of this rank does what follows its loop next, and whether all ranks of the group do the same.
        self.loop_ends = self.are_alike = False

    def enter_first(self, which: sessions.Which) -> None:
        """Enters this worker's first group, with the state that an earlier worker left."""
        self._which = which
        if which.number > 0:
            worker.training_is_over(False)
        if worker.available():
            if which.number == 0 and self._replica.mesh is None:
                self._healing = heal.begin(self._training, which.word, self._operation_timeout)
            worker.on_round_change(self._round_forms)
            place = worker.ready()
            self._left = self._disk.take_up()
            if self._left is not None and self._healing is None:
                self._disk.load_left()
                self.departure.phase = Phase.BETWEEN
        elif os.environ.get("WORLD_SIZE", "1") == "1":
            place = {"rank": 0, "world_size": 1, "round": 0, "checkpoint": None}
        else:
            raise worker.AgentError(
                "WORLD_SIZE is set, but elastic-agent has not started this process: start it by elastic-agent, or by "
                "itself"
            )
        self._enter_or_next(place, "")

    def enter_next(self, lost: str | None) -> None:
        """Leaves the group, and enters the next round's. lost: why the group is broken, if it is."""
        while True:
            self.leave_group()
            if self.departure.asked:
                self._leave()
            if not worker.available():
                raise RuntimeError(f"the group is lost ({lost}), and there is no agent that forms another")
            try:
                if self.departure.phase is Phase.IN_GROUP:
                    self.departure.phase = Phase.BETWEEN
                place, self._taken = self._taken or self._next_place(lost), None
            except SystemExit:
                self._leave()
            except worker.AgentError as error:
                raise worker.AgentError(f"{error}; the group was left because: {lost or 'it changes'}") from error
            try:
                self._enter(place)
                return
            except GroupLost as error:
                lost = str(error)

    @contextlib.contextmanager
    def aside(
        self, agree: Callable[[Group], None] | None = None, alone: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """While the script does something else than steps, on all ranks: keeps this worker's place. In the end all ranks
        are there again, perhaps in another group.

        agree: what the ranks then do together. alone: what each does by itself if that group was lost before."""
        if not worker.available():
            yield
            if agree is not None:
                agree(self.group)
            return
        # A signal to leave has nothing to wait for.
        self.departure.phase = Phase.BETWEEN
        taken, self._taken = self._taken, None
        aside = Aside(None if taken else self.group, self._next_place, taken)
        with self._keeping(aside):
            yield

        def outcome() -> None:
            aside.outcome()
            if agree is not None:
                agree(self.group)

        try:
            self._replica.together(outcome)
            self.departure.phase = Phase.IN_GROUP
            return
        except GroupLost as error:
            lost = str(error)
        if alone:
            aside = Aside(None if aside.place else self.group, self._next_place, aside.place)
            with self._keeping(aside):
                alone()
        self._enter_or_next(aside.place, lost)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """As `aside`, where other ranks may be in their next step already: there they wait for this one."""
        if not worker.available():
            yield
            return
        self.departure.phase = Phase.BETWEEN
        aside = Aside(None, self._next_place, self.place)
        with self._keeping(aside):
            yield
        place = None if aside.place is self.place else aside.place

        def outcome() -> None:
            if place:
                raise GroupLost("a round has formed meanwhile")

        try:
            self._replica.together(outcome)
            self.departure.phase = Phase.IN_GROUP
        except GroupLost as error:
            self._enter_or_next(place, str(error))

    @contextlib.contextmanager
    def _keeping(self, aside: Aside) -> Iterator[None]:
        try:
            if self.departure.asked:
                self.departure.leave()
            yield
            aside.end()
        except SystemExit:
            self.leave_group()
            if self.departure.asked:
                self._leave()
            raise
        finally:
            aside.give_up()

    def _enter_or_next(self, place: dict[str, Any] | None, lost: str) -> None:
        self.leave_group()
        try:
            if place is not None:
                self._enter(place)
                return
        except GroupLost as error:
            # Not the error itself: its frames would keep the connections.
            lost = str(error)
        self.enter_next(lost)

    def _next_place(self, lost: str | None) -> dict[str, Any]:
        """Comes to rest, and waits for this worker's place in the next round."""
        if not worker.forms_within(self._loss_timeout):
            worker.request_round(f"its group is broken: {lost or 'a change that did not come'}")
        # The agent bounds this wait: by join_timeout, and its own end.
        return worker.quiesce(self._training.step_number)

    def leave_group(self) -> None:
        """Leaves the group, if there is one."""
        group, self.group = self.group, None
        slow, self._slow = self._slow, None
        if slow:
            slow.give_up()
        if group:
            group.close()

    def begin_step(self) -> None:
        """Before a step, whose forward and backward pass may take very long if it is the first in this group, as where
        a newcomer compiles. From now on the others hear that this rank is at work, not only that it says nothing."""
        if not self._all_are_there and self._slow is None and self.group.size > 1:
            self._slow = Aside(self.group, self._next_place, limit=SLOW * self._operation_timeout)

    def meet_in_first_step(self, compute: Callable[[], None] = lambda: None) -> bool:
        """If this is the first step in this group, computes its gradient, and waits until all ranks have theirs. Returns
        whether it did."""
        if self._all_are_there or self.group.size == 1:
            return False
        self.begin_step()
        compute()
        slow, self._slow = self._slow, None
        self._end(slow)
        self._all_are_there = True
        return True

    def _end(self, slow: Aside) -> None:
        """Raises GroupLost if the group was. This rank may have its next place then."""
        slow.end(while_waiting=lambda: self._leave() if slow.lost is not None and self.departure.asked else None)
        self._taken = slow.place
        slow.outcome()

    def meet_at_the_end(self) -> None:
        """Waits until every rank has done the last step: one that has not needs the state of another. Who joins while
        they do needs it too."""
        if not self.completed:
            worker.training_is_over()
        self.group.gather(self._training.step_number)
        if any(self.group.gather(worker.forming() is not None)):
            raise GroupLost("a round forms after the last step")

    def save_together(self, save: Callable[[], None] | None) -> None:
        """Writes a checkpoint; None where another rank does. All ranks call this, and it returns on all when each is
        done. However long that takes, rounds may form meanwhile."""
        self._save(self.group, save or (lambda: None))

    def save_apart(self, save: Callable[[], None]) -> None:
        """As `save_together`, where the other ranks leave the group and do not wait."""
        self.leave_group()
        with contextlib.suppress(GroupLost):
            self._save(None, save)

    def _save(self, group: Group | None, save: Callable[[], None]) -> None:
        if not worker.available():
            save()
            return
        slow = Aside(group, self._next_place)
        try:
            save()
        except BaseException:
            slow.give_up()
            raise
        self._end(slow)

    def _read_together(self, read: Callable[[], Any] | None) -> Any:
        """What takes this rank long to read; None where another rank does. If the group is lost, nothing waits for it."""
        errand = Errand(read) if read else None
        self.group.finish_with_all([errand] if errand else [])
        return errand and errand.result()

    def _enter(self, place: dict[str, Any]) -> None:
        """Joins the ranks of a round, and comes to one state with them."""
        if self.departure.phase is Phase.BETWEEN:
            self.departure.phase = Phase.IN_GROUP
        self.place, self._all_are_there = place, False
        self._training.set_place(*self._replica.among_readers(place))
        found: list[Any] = []
        while not found:
            self.group = Group(self._replica.peers(place))
            self._replica.together(lambda: found.extend(self._meet_and_agree()))
            if not found:
                # Others were in an earlier session, and come to this one.
                self.group.close()
        (loaded,) = found
        if loaded is not None:
            self._disk.load(loaded)
        if self.completed:
            self._complete()
        else:
            self.departure.phase, self._healing = Phase.IN_GROUP, None
            if self._replica.mesh is None:
                self.feeds.offer(place, self._which.word)

    def _complete(self) -> None:
        """This rank has the result of a session that it does not train: the others are not in it any more."""
        self.leave_group()
        self.group = Group({**self.place, "rank": 0, "world_size": 1})
        self._disk.is_saved(self._training.step_number)

    def _meet_and_agree(self) -> list[Any]:
        """Meets the ranks of the round. Returns what this rank is to load, None if it has that state; nothing if it is
        to meet them again."""
        group = self.group
        group.join(timeout=self._operation_timeout, outdated=lambda: worker.forming() is not None, nccl=self._nccl)
        told = [_Told(*json.loads(one)) for one in group.gather_texts(json.dumps(self._tells()))]
        words = [one.word for one in told]
        if len(set(words)) == 1:
            return [self._agree(told)]
        first, receivers = sessions.behind(words)
        if len(receivers) == group.size:
            names = [f"{name!r} on rank {rank}" for rank, name in enumerate(group.gather_texts(self._which.name))]
            worker.give_up(f"the ranks are in sessions of different names: {'; '.join(names)}")
        holders = [rank for rank, has in enumerate(group.gather(sessions.has_result(first))) if has]
        self.completed = group.rank in receivers
        if not holders and self.completed:
            raise ValueError(
                f"the other ranks have completed session {first + 1} of the script, and have not kept its result for "
                "this one: give each session of the script a name"
            )
        if not holders:
            raise GroupLost(f"rank {receivers[0]} is in an earlier session of the script, and gets no result of it")
        mesh = self._replica.mesh_of
        value = state.share(group, lambda: sessions.result(first, mesh), holders, receivers, mesh)
        return [value] if self.completed else []

    def _tells(self) -> _Told:
        step, healing = self._training.step_number, self._healing
        if self.departure.phase is Phase.STARTING:
            step = -1 if self._left is None else self._left
        follows = healing.number() if healing else 0
        return _Told(self._which.word, step, self._known, self.loop_ends, follows, self.feeds.numbers())

    def _agree(self, told: list[_Told]) -> Any:
        """Gives all ranks the state that `choose` chooses; without any, what rank 0 began with. Returns what this rank
        is to load, None if it has that state."""
        group, healing, mesh = self.group, self._healing, self._replica.mesh_of
        checkpoint = self._disk.own(self.place.get("checkpoint"), self._which.name)
        self.are_alike = all(one.loop_ends for one in told) and len({one.step for one in told}) == 1
        offers = [[Offer(one.step)] if one.step >= 0 else [] for one in told]
        choice = choose(offers, checkpoint["step"] if checkpoint else None)
        self._wait_for_newer(choice.step, max(one.known for one in told))
        given = {number for rank in choice.holders for number in told[rank].feeds}
        healed = [rank for rank, one in enumerate(told) if one.follows in given and rank not in choice.holders]
        if healing and group.rank not in healed:
            healing.end()
        if choice.source == "nothing":
            self._begin()
            if healing and healing.has_begun and group.rank == 0:
                raise worker.AgentError("the ranks are gone whose state this worker was about to get")
        elif healing and group.rank in choice.holders:
            self._disk.load_left()
        if choice.source == "checkpoint":
            read = lambda: checkpoints.read(checkpoint, self._replica.layout, mesh)  # noqa: E731
            value = self._read_together(read if group.rank == 0 else None)
            if group.rank == 0:
                self._disk.load(value)
            self._disk.is_saved(choice.step)
        holders = choice.holders or (0,)
        receivers = [rank for rank in range(group.size) if rank not in (*holders, *healed)]
        value = state.share(group, self._training.value, holders, receivers, mesh)
        # The others begin a step, and take the part of those that still get what they lack.
        self._training.set_place(*self._replica.among_readers(self.place), healed)
        self.feeds.end_with_rest([told[rank].follows for rank in healed])
        return self._rest() if group.rank in healed else value

    def _rest(self) -> Any:
        """The state to load, which this worker nearly has. The others do not wait for that until their step's sum."""
        value = self._healing.rest(self.group.has_lost_a_peer)
        if value is None:
            raise GroupLost("what this worker lacks of the state has not come")
        return value

    def _begin(self) -> None:
        """No rank has a state, and the job has committed none. The training begins at what the disk has, or at step 0.
        Ends the job if steps were done whose state is nowhere, unless they are those of another session."""
        if self._which.number > 0 and not self._which.name:
            return
        done = max(self.group.gather(max(self._known, worker.steps_done()))) if worker.available() else 0
        step = self._disk.begin(self.group, self.place, self._read_together, is_first=done == 0)
        self._known = max(self._known, step)
        if done and not step and self._which.number == 0 and not self.place.get("checkpoint"):
            worker.give_up(
                f"the job has done {done} steps, and no worker has their state any more: {self._disk.why_lost()}. To "
                "begin again at step 0, start all agents with --fresh, or with another --rdzv-id"
            )

    def _wait_for_newer(self, newest: int, known: int) -> None:
        """If a rank with a state newer than `newest` died before another rank had it: with snapshots it is still in its
        agent's memory, and comes back with that agent's next worker. This waits for it. known: the newest of any rank."""
        self._known = max(newest, known)
        if newest < known and self._disk.snapshot_every is None:
            if newest:
                say(f"no rank has the state of step {known} any more: training continues from step {newest}")
                self._known = newest
        elif newest < known:
            say(f"no rank here has step {known}: waiting {_RETURN:.0f} s for the worker whose agent holds its snapshot")
            if worker.forms_within(_RETURN):
                raise GroupLost("the rank that had the newest state may come back")
            self._known = newest or known

    def _leave(self) -> NoReturn:
        """Ends this worker, which was asked to leave and is in no group."""
        if self.departure.phase is not Phase.STARTING:
            self.departure.phase = Phase.LEAVING
            self._disk.save_alone(self.place)
        self.departure.leave()

    def _round_forms(self, round_: int, reason: str) -> None:
        until = time.monotonic() + min(worker.quiesce_time() / 2, max(1.0, 3 * self.longest_step))
        threading.Thread(target=self._end_stuck_step, args=(round_, until), name="elastic-session", daemon=True).start()

    def _end_stuck_step(self, round_: int, until: float) -> None:
        """Cuts the group that round `round_` replaces, if it is still at work after `until`: a peer is silent, and no
        connection says so. A step that ends in time is left alone, so that a planned change repeats nothing."""
        while (group := self.group) is not None and group.round < round_:
            if time.monotonic() > until:
                group.cut()
            time.sleep(0.02)
