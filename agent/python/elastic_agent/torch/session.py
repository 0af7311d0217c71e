"""A training loop that survives changes of its group in one process.

    joined ──▶ a step: micro-batches, sums, votes ──▶ applied ──▶ the next step …
                   │ a peer is gone                     │ the ranks have voted for a change
                   ▼                                    ▼
               the group is left ──▶ quiesced ──▶ the next round's place ──▶ joined: the furthest rank's state for all

Rounds are in membership.py, what steps change in state.py, and what outlives the process in disk.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader

from .. import worker
from ..batches import ElasticBatchSampler
from . import checkpoints, draws, refusals, sessions, tree
from .checkpoints import Folder
from .disk import Disk
from .evaluation import Evaluation
from .gradients import Gradients
from .group import Group, GroupLost
from .keeper import say
from .membership import Membership
from .nccl import Nccl
from .ordered import OrderedGradients
from .replica import Replica
from .sameness import Sameness
from .state import Training
from .step import Epoch, Step, Turn
from .votes import Vote

# Seconds between two losses that are reported.
_LOSS_EVERY = 5.0


class Session:
    """The training of one model on a group of ranks that may change at any time::

        sampler = elastic.ElasticBatchSampler(dataset, global_batch=256)
        loader = DataLoader(dataset, batch_sampler=sampler)
        with elastic.Session(model, optimizer, sampler) as session:
            for images, labels in session.steps(loader, epochs=10):
                session.backward(loss_of(model(images), labels))
                session.step()

    Whenever workers die or join, a step is applied on every rank, or on none and done again; each sample is used by
    exactly one step of an epoch, on exactly one rank; and a step's gradient is the mean over its global batch.
    docs/pytorch-sessions.md has all promises. Without an agent it trains alone.

    A model that `fully_shard` divides over `elastic_agent.torch.node_mesh()` has a replica on each node. A rank is then a
    node: its workers live and die together. Buffers (such as BatchNorm's statistics) are each rank's own.

    The arguments are the same on every rank. All ranks begin with the parameters of rank 0.

    - scheduler: a learning rate scheduler. It advances with each step, or with `scheduler_per="epoch"` with each epoch.
    - on_group: called with the session in each group, before its first step, when all ranks have one state: for example
      to set a learning rate by `world_size`.
    - checkpoint_dir: a folder that all nodes share. Rank 0 writes a checkpoint there after every `checkpoint_every`
      steps, after the last one, and when a node is asked to leave; the newest `keep_checkpoints` are kept. Steps wait for
      the write, unless there are snapshots: these are written during training. Of a sharded model each rank of the first
      node writes its part, in the layout of torch.distributed.checkpoint.
    - snapshot_every: the state is copied into the agent's memory after this many steps, during the next one. If all
      workers die and an agent lives, training resumes from it.
    - seed: torch's random numbers for a batch depend only on it, the step, and the batch's place among the step's
      samples. Without it rank 0 draws one, and it is part of the state.
    - same_bits: the result is the same to the last bit for any number of ranks, on machines that compute alike. Gradients
      of `micro_batch`es are added in their order, after the backward pass. The sampler must have a `global_batch`.
    - name: for a script of several sessions. A worker that starts when the others have completed one gets its model from
      them: they keep a copy. Its checkpoints are in a folder of its name in `checkpoint_dir`.
    - backend: "nccl", "gloo", or None for NCCL if the parameters are on a GPU and all ranks have it, else gloo. Without
      NCCL, gradients on a GPU go through the hosts, and a line says why. All else uses gloo.
    - operation_timeout: seconds that an exchange between ranks may take, counted from the last piece of a state that has
      come, and that a commit may take. A rank that gives signs of life has ten times as long.
    - loss_timeout: seconds to wait for a round after the group is broken. If none forms by then, no node has died that
      the agents know of: this worker requests a round, which costs the job a restart.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: ElasticBatchSampler,
        *,
        scheduler: Any = None,
        scheduler_per: str = "step",
        on_group: Callable[[Session], None] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1000,
        keep_checkpoints: int = 2,
        snapshot_every: int | None = None,
        seed: int | None = None,
        same_bits: bool = False,
        name: str = "",
        backend: str | None = None,
        operation_timeout: float = 60,
        loss_timeout: float = 5,
    ) -> None:
        if keep_checkpoints < 1 or checkpoint_every < 1 or (snapshot_every is not None and snapshot_every < 1):
            raise ValueError("checkpoint_every, keep_checkpoints and snapshot_every are 1 or more")
        refusals.check(model, optimizer)
        self._replica = replica = Replica(model)
        refusals.check_group(model, replica)
        refusals.fit(sampler, model, replica, same_bits)
        folder = None
        if checkpoint_dir is not None:
            path = checkpoints.place_of(checkpoint_dir, name)
            folder = Folder(path, checkpoint_every, keep_checkpoints, operation_timeout, replica.word)
        self.model, self.optimizer, self.sampler, self.scheduler = model, optimizer, sampler, scheduler
        self._on_group, self._name = on_group, name
        self._training = Training(model, optimizer, sampler, scheduler, seed, scheduler_per)
        self._gradients = (OrderedGradients if same_bits else Gradients)(model.named_parameters())
        self._disk = Disk(self._training, replica, folder, snapshot_every, operation_timeout)
        self._trained = refusals.Trained(model, optimizer, replica)
        self._sameness = Sameness(self._training)
        nccl = Nccl(list(model.parameters()), backend)
        self._members = Membership(self._training, self._disk, replica, nccl, (operation_timeout, loss_timeout))
        self._step, self._loss_read, self._first = Step([]), -_LOSS_EVERY, True
        # Whether the script has left a loop before its end.
        self._left = False

    @property
    def step_number(self) -> int:
        """The number of steps that are done."""
        return self._training.step_number

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""
        return self.sampler.epoch

    @property
    def rank(self) -> int:
        """This worker's rank in the round under way."""
        return self._members.place["rank"]

    @property
    def world_size(self) -> int:
        """The number of ranks in the round under way."""
        return self._members.place["world_size"]

    def warm_up(self, loss: Callable[[], torch.Tensor]) -> None:
        """Before the `with`: computes a loss and its gradient, as a step will, while no other rank waits for this one.
        So `torch.compile` compiles, and CUDA starts. Buffers and random numbers are then as before, and no gradient is
        left.

        ::

            session = elastic.Session(model, optimizer, sampler)
            session.warm_up(lambda: loss_of(model(images), labels))
            with session:
        """
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        with torch.random.fork_rng():
            loss().backward()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        self._gradients.clear()

    def __enter__(self) -> Session:
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
            self._gradients.remove()
            self.sampler.batch_of = None
            self._members.departure.end()

    def steps(self, loader: Any, epochs: int = 1) -> Iterator[Any]:
        """This rank's batches, until `epochs` epochs are done.

        loader: a DataLoader with this session's sampler as its `batch_sampler`. Give each batch to `backward`, and then
        call `step`. After a change of the group, the session restarts the loader at the group's position.
        """
        if getattr(loader, "batch_sampler", None) is not self.sampler:
            raise ValueError("the loader must have the session's sampler: DataLoader(dataset, batch_sampler=sampler)")
        if self._members.completed:
            return
        if self.sampler.epoch >= epochs:
            say(
                f"session.steps has nothing left to do: `epochs={epochs}` counts all epochs of the training, and "
                f"{self.sampler.epoch} are done. A loop by epochs is `for epoch in session.epochs(…)`"
            )
        self._close_loop()
        try:
            yield from self._steps_until(loader, epochs)
        except GeneratorExit:
            # A `break`, perhaps on this rank alone.
            self._left = True
            raise

    def _steps_until(self, loader: Any, epochs: int) -> Iterator[Any]:
        while self.sampler.epoch < epochs:
            self.sampler.batch_of = functools.partial(draws.Batch, seed=f"{self._training.seed} {self.epoch}")
            # What a loader's processes draw as they start is another rank's otherwise.
            self._training.seed_for(f"loader {self.sampler.first_place()}")
            epoch, batches = self.sampler.epoch, iter(loader)
            while self.sampler.epoch == epoch:
                yield from self._batches_of_a_step(loader, batches)
                if self._step.ended:
                    self._gradients.clear()
                    say(f"another rank has left the loop after step {self.step_number}, and so does this one")
                    return
                if self._changes():
                    # Batches that were read ahead are another place's.
                    break
                self._members.longest_step = max(0.9 * self._members.longest_step, time.monotonic() - self._step.began)

    def epochs(self, count: int) -> Iterator[Epoch]:
        """The epochs that are left of `count`: for what a script does once an epoch. A worker that comes later begins
        with the one under way.

        ::

            for epoch in session.epochs(10):
                for images, labels in epoch.batches(loader):
                    session.backward(loss_of(model(images), labels))
                    session.step()
        """
        while self.epoch < count and not self._members.completed:
            number = self.epoch
            try:
                yield Epoch(number, self)
            except GeneratorExit:
                self._left = True
                raise
            if self.epoch == number:
                raise RuntimeError("an epoch ends when all its steps are done: `for batch in epoch.batches(loader)`")

    def _batches_of_a_step(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        place = self.sampler.first_place()
        self._step = step = Step(self.sampler.micro_batches())
        self._members.begin_step()
        for size in step.batches:
            with draws.kept(loader, f"{self._training.seed} {self.step_number} {place}"):
                batch = self._members.departure.next_batch(batches)
            if batch is None:
                step.lost = "this worker is asked to leave, and so were the processes that read its batches"
                return
            self._training.seed_for(place)
            place += size
            step.turn = Turn.BACKWARD
            yield batch
            if step.turn is not Turn.NEXT_BATCH:
                raise RuntimeError("call session.backward(loss) and then session.step() for each batch")
            if step.lost is not None:
                return

    def backward(self, loss: torch.Tensor, count: float | None = None) -> None:
        """Adds the gradient of this batch's mean loss. After the last batch of the step it returns with the whole group's
        gradient in the parameters, where it can be clipped.

        count: the loss is the sum over so many, such as tokens. The step's gradient is then that of the sum over all
        batches and ranks, divided by the sum of all counts."""
        step = self._step
        if step.turn is not Turn.BACKWARD:
            raise RuntimeError("session.backward is for a batch of session.steps, once for each")
        if step.done and (count is None) is not (step.count is None):
            raise RuntimeError("give session.backward a count with each batch of a step, or with none")
        size = step.batches[step.done]
        # A sharded model's gradients are means over the ranks of its replica.
        share = size * self._replica.size / self.sampler.step_size()
        if count is not None:
            # A batch without samples only keeps step with other ranks.
            share, step.count = float(self._replica.size * (size > 0)), (step.count or 0) + count * (size > 0)
        if step.done < len(step.batches) - 1:
            self._add(loss * share)
        else:
            self._sum_up(loss * share)
        step.turn = Turn.STEP
        if step.lost is None:
            step.loss = loss.detach() if count is None else loss.detach() / max(count, 1)
            step.done += 1

    @property
    def step_is_complete(self) -> bool:
        """Whether the gradient of the whole step, over all ranks, is in the parameters: from `backward` of its last batch
        to `step`."""
        return self._step.is_complete

    def clip(self, max_norm: float) -> torch.Tensor | None:
        """Between `backward` and `step`: scales the gradient of a whole step down to a norm of `max_norm` at most, and
        returns what its norm was. After a batch that is not the step's last, it does nothing and returns None: to clip a
        part of the gradient would make the result depend on the number of ranks."""
        if not self.step_is_complete:
            return None
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def step(self) -> bool:
        """Applies the step, if this was its last batch. Returns whether it was applied: not for an earlier batch, and not
        if a peer is gone; then the step is done again in the next group."""
        complete = self._step.is_complete
        if self._step.turn is Turn.STEP:
            self._step.turn = Turn.NEXT_BATCH
        if not complete:
            return False
        self._trained.check()
        self._training.apply()
        if self._first:
            # Optimizers have a state now.
            tree.take_apart(self._training.value())
            self._first = False
        self._gradients.clear()
        self._disk.take_snapshot(self._members.place)
        worker.report_progress(self.step_number, epoch=self.epoch, loss=self._newest_loss())
        return True

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
            self._gradients.clear()
            self._step = Step([], moved=True)
            self._tell_group()

    def evaluate(self, loader: DataLoader, measure: Callable[[Any], Any]) -> torch.Tensor | None:
        """The sum of what `measure` gives for each batch, over all batches of a loader: each is read by one rank. Every
        rank calls this after the same step, as with `aside`, and gets the same sum, in double precision. If the group
        changes meanwhile, each rank reads all batches. None if there is no batch.

        ::

            correct, samples = session.evaluate(loader, lambda batch: torch.stack(count(model, batch)))

        measure: returns a number, or a tensor of a few: sums over the samples of its batch. The model is in the mode for
        evaluation, and nothing has a gradient. Of a sharded model each node reads a part.
        """
        self._training.seed_for("evaluation")
        found = Evaluation(self.model, loader, measure)
        with self._aside(agree=found.add_up, alone=lambda: found.part(0, 1)):
            found.part(self._members.group.rank, self._members.group.size)
        return found.total

    def _add(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._gradients.keep(first=self.rank == 0)

    def _sum_up(self, loss: torch.Tensor) -> None:
        """The last backward pass of a step, and the sums over the group."""
        step, group = self._step, self._members.group
        counted = step.count is not None

        def summed() -> tuple[float, ...]:
            computed = self._members.meet_in_first_step(lambda: self._add(loss))
            mark = self._sameness.mark(counted=counted) if group.size > 1 else 0
            changing, leaving = worker.forming() is not None, self._members.departure.asked
            self._gradients.sum_over(group, Vote(changing, leaving, False, step.count or 0, mark))
            if not computed:
                self._add(loss)
            self._disk.copied()
            votes = self._gradients.finish()
            if not votes.ended:
                self._sameness.compare(group, votes.marks, counted=counted, before=self._disk.may_change)
            return votes.changing, votes.leaving, votes.ended, votes.count

        try:
            changing, leaving, ended, count = self._replica.together(summed)
        except GroupLost as lost:
            step.lost = str(lost)
            return
        step.votes, step.ended = (round(changing), round(leaving)), ended > 0
        if counted:
            self._gradients.divide(count or 1)

    def _newest_loss(self) -> float | None:
        """The loss of this rank's newest batch, now and then: to read it waits for the GPU."""
        if self._step.loss is None or time.monotonic() - self._loss_read < _LOSS_EVERY:
            return None
        self._loss_read = time.monotonic()
        return self._step.loss.item()

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

    def _close_loop(self) -> None:
        """After a `break`, which may be this rank's alone: the others hear of it where they wait for its gradient."""
        if not self._left:
            return
        self._left, step = False, self._step
        if step.is_complete:
            raise RuntimeError("leave a loop before session.backward or after session.step: other ranks apply this step")
        if not step.settled and not step.moved and (step.lost is not None or step.done == len(step.batches)):
            self._changes()
        self._step = Step([])
        while self._members.group.size > 1:
            try:
                self._replica.together(self._say_ended)
                return
            except GroupLost as lost:
                self._next_group(str(lost))

    def _say_ended(self) -> None:
        self._gradients.clear()
        self._members.meet_in_first_step()
        self._gradients.sum_over(self._members.group, Vote(ended=True))
        self._gradients.finish()
        self._gradients.clear()

    def _next_group(self, lost: str | None) -> None:
        self._members.leave_group()
        self._gradients.clear()
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
