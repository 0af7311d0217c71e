"""Training loops that survive changes of their group: what all of them have, which is this worker's place, sums for the
script, the way from one group to the next, and the end; and a loop of the script's own. A session's steps are in
session.py.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

import torch

from .. import worker
from . import checkpoints, collectives, refusals, sessions, tree
from .beginning import Beginning
from .checkpoints import Folder
from .disk import Disk
from .group import Group, GroupLost
from .membership import Membership
from .nccl import Nccl
from .replica import Replica
from .state import Progress, State, leaves
from .step import Step
from .votes import Vote, Votes, room

_Kind = TypeVar("_Kind", bound="Elastic")


class Elastic:
    """A loop whose ranks come and go."""

    def __init__(
        self,
        training: Progress,
        replica: Replica,
        nccl: Nccl,
        *,
        on_group: Callable[[Any], None] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1000,
        keep_checkpoints: int = 2,
        resume: str | os.PathLike[str] = "auto",
        snapshot_every: int | None = None,
        name: str = "",
        operation_timeout: float = 60,
        loss_timeout: float = 5,
    ) -> None:
        if keep_checkpoints < 1 or checkpoint_every < 1 or (snapshot_every is not None and snapshot_every < 1):
            raise ValueError("checkpoint_every, keep_checkpoints and snapshot_every are 1 or more")
        folder = None
        if checkpoint_dir is not None:
            path = checkpoints.place_of(checkpoint_dir, name)
            folder = Folder(path, checkpoint_every, keep_checkpoints, operation_timeout, replica.word)
        self._training, self._replica, self._on_group, self._name = training, replica, on_group, name
        beginning = Beginning(folder and folder.path, resume)
        self._disk = Disk(training, replica, folder, snapshot_every, operation_timeout, beginning)
        self._members = Membership(training, self._disk, replica, nccl, (operation_timeout, loss_timeout))
        # Whether the script is in its steps already, or none is left for it.
        self._step, self._is_aside, self._begun = Step([]), False, False

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

    def mean(self, value: Any, count: float = 1) -> Any:
        """The mean of all ranks' values: of numbers a number, of tensors a tensor in double precision. count: how much
        this rank's value counts, such as the number of its samples. Every rank calls this at the same place."""
        own = value.detach().double() if isinstance(value, torch.Tensor) else float(value)
        return self._ask_all(lambda group: collectives.mean(group, own, count), own)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, which have one shape. It has no gradient. Every rank calls this at the same
        place."""
        return self._ask_all(lambda group: collectives.total(group, tensor), tensor.detach())

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks' tensors, in the order of ranks. Ranks may have different numbers of rows. Gradients go
        back to the ranks that the rows are from. Every rank calls this at the same place."""
        return self._ask_all(lambda group: collectives.gather(group, tensor, ""), tensor)

    def agree(self, value: Any) -> Any:
        """What rank 0 has: numbers, text, and lists, tuples, sets and dicts of these. Every rank calls this at the same
        place."""
        return self._ask_all(lambda group: collectives.of_rank_0(group, value), value)

    def _ask_all(self, operation: Callable[[Group], Any], own: Any) -> Any:
        """Does what all ranks do together. own: what is used instead if the script must not hear of a lost group."""
        raise NotImplementedError

    def aside(self) -> AbstractContextManager[Any]:
        """Around what a script does between two steps and that takes long, such as an evaluation or a test: rounds form
        meanwhile, and no other rank takes this one for lost.

        ::

            with session.aside():
                accuracy = evaluate(model)

        Every rank enters it after the same step; what is done inside may be another on each. It changes nothing that a
        step changes. At its end all ranks wait for each other, at the latest in their next step.
        """
        return self._aside()

    @contextlib.contextmanager
    def _aside(
        self, agree: Callable[[Group], None] | None = None, alone: Callable[[], None] | None = None
    ) -> Iterator[bool]:
        """Gives whether all ranks do this together. They do not where some may be in their next step already: workers
        that have just come do no more than that."""
        self._close_loop()
        if self._step.lost is None and self._step.done < len(self._step.batches):
            raise RuntimeError("`aside` is for what is done between two steps, after the end of one")
        if not self._training.is_common:
            raise RuntimeError("ranks have models of their own between outer steps: do this when session.in_sync is true")
        self._disk.take_snapshot(self._members.place)
        group, entered = self._members.group, time.monotonic()
        together = self._begun and not self._step.moved
        self._is_aside = True
        try:
            with self._members.aside(agree, alone) if together else self._members.apart():
                yield together
        finally:
            self._is_aside = False
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

    def _meet_at_the_end(self) -> None:
        self._members.meet_at_the_end()

    def _changes(self, *, loop_ends: bool = False) -> bool:
        """After a step: enters the next group if this one changes. Returns whether it did. loop_ends: the script does
        what follows its loop next."""
        self._step.settled = True
        self._disk.take_snapshot(self._members.place)
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
                save() if self._members.departure.asked else self._members.save_apart(save)
            if self._members.departure.asked:
                self._members.departure.leave()
        self._members.loop_ends = loop_ends
        self._next_group(lost)
        self._members.loop_ends = False
        # Ranks that are elsewhere do a step next.
        self._step.moved = not self._members.are_alike
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
            self._replica.together(lambda: self._members.save_together(save))
        except GroupLost as lost:
            return str(lost)
        return None

    def _finish_together(self) -> None:
        """The last step is done on all ranks, and saved. A worker that starts later has no more to do then."""
        self._close_loop()
        while True:
            try:
                self._replica.together(self._meet_at_the_end)
                why = self._save_together()
            except GroupLost as lost:
                why = str(lost)
            if why is None:
                return
            self._next_group(why)


# What a rank of a `Loop` does.
_ASKS, _ENDS_STEP, _LEAVES = "asks the others for a sum", "ends its step", "has left the loop"


class Loop(Elastic):
    """A training loop of the script's own, such as that of two models or of reinforcement learning, on a group of ranks
    that may change at any time.

    ::

        state = elastic.State(generator=generator, critic=critic, optimizers=[of_generator, of_critic])
        with elastic.Loop(state) as loop:
            while loop.step_number < 10_000:
                with loop.step():
                    loss_of(critic, samples(loop.step_number, loop.rank, loop.world_size)).backward()
                    loop.mean_gradients(critic)
                    of_critic.step()
                    ...

    What is in `with loop.step()` is done on all ranks, or on none and again: it changes only what is in the state, and asks
    other ranks in the same order on all. At its end the ranks commit the state, which takes a copy of it, and nodes join
    and leave. If a peer is lost before, the ranks that are left restore their last commit.

    The ranks begin with the state of rank 0. Data and random numbers are the script's: by `step_number`, `rank` and
    `world_size`. All other arguments are as for a `Session`: `on_group`, which may change the state, `checkpoint_dir`,
    `checkpoint_every`, `keep_checkpoints`, `resume`, `snapshot_every`, `name`, `backend`, `operation_timeout` and
    `loss_timeout`.
    """

    def __init__(self, state: State, *, backend: str | None = None, **settings: Any) -> None:
        models = torch.nn.ModuleList(one for one in leaves(state) if isinstance(one, torch.nn.Module))
        replica = Replica(models)
        refusals.check_group(models, replica)
        if replica.mesh is not None:
            raise ValueError("elastic.Loop is for models that every rank holds as a whole: a Session trains sharded ones")
        super().__init__(Progress(state), replica, Nccl(list(models.parameters()), backend), **settings)
        self._state, self._in_step = state, False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, which ends with a commit. If a peer is lost, the state is that of the last commit again, and
        `step_number` is as before. Raises RuntimeError if other ranks do something else."""
        self._close_loop()
        self._step = step = Step([])
        self._begun = self._in_step = True
        try:
            yield
            votes = self._vote()
            step.votes = votes.changing, votes.leaving
        except GroupLost as lost:
            step.lost = str(lost)
        finally:
            self._in_step = False
        if step.lost is None:
            self._state.commit()
            self._training.step_number += 1
            worker.report_progress(self.step_number)
        else:
            self._disk.may_change()
            self._state.restore()
        # Workers that have just come begin with a step, whatever this one does before its next.
        if not self._changes():
            self._members.longest_step = max(0.9 * self._members.longest_step, time.monotonic() - step.began)

    def mean_gradients(self, model: torch.nn.Module) -> None:
        """After a backward pass: gives the parameters of a model the mean of all ranks' gradients. Every rank calls this
        at the same place."""
        self._ask_all(lambda group: collectives.mean_gradients(group, model.parameters()), None)

    def _ask_all(self, operation: Callable[[Group], Any], own: Any) -> Any:
        if not self._in_step:
            raise RuntimeError("ask other ranks within `with loop.step()`: workers that join later do only that, too")
        self._vote(_ASKS)
        return operation(self._members.group)

    def _close_loop(self) -> None:
        if self._in_step:
            raise RuntimeError("another step, and `aside`, are for after the end of `with loop.step()`")

    def _vote(self, does: str = _ENDS_STEP) -> Votes:
        """Tells the others what this rank does now: sums of other sizes would end all processes."""
        group, kinds = self._members.group, [_ASKS, _ENDS_STEP, _LEAVES]
        places = torch.zeros(room(group.size), dtype=torch.float64)
        changing, leaving = worker.forming() is not None, self._members.departure.asked
        Vote(changing, leaving, does == _LEAVES, mark=kinds.index(does)).write(places, group.rank)
        group.finish(group.start_sum(places))
        votes = Votes.read(places)
        for rank, mark in enumerate(votes.marks):
            if kinds[mark] != does:
                raise RuntimeError(
                    f"after {self.step_number} steps rank {group.rank} {does}, and rank {rank} {kinds[mark]}: do the "
                    "same on all ranks, by what is the same on all, such as step_number, the state, or loop.agree(…)"
                )
        return votes

    def _meet_at_the_end(self) -> None:
        self._vote(_LEAVES)

    def _tell_group(self) -> None:
        super()._tell_group()
        self._state.commit()
