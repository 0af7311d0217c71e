"""A training loop that survives changes of its group in one process.

    joined ──▶ a step: micro-batches, sums, votes ──▶ applied ──▶ the next step …
                   │ a peer is gone                     │ the ranks have voted for a change
                   ▼                                    ▼
               the group is left ──▶ quiesced ──▶ the next round's place ──▶ joined: the furthest rank's state for all

What follows a step is in loop.py, rounds are in membership.py, what steps change in state.py, and what outlives the
process in disk.py.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import worker
from ..batches import ElasticBatchSampler
from . import draws, refusals, tree
from .asking import Asking
from .gradients import Gradients
from .group import GroupLost
from .keeper import say
from .local import LocalGradients, LocalTraining
from .nccl import Nccl
from .ordered import OrderedGradients
from .replica import Replica
from .sameness import Sameness
from .state import State, Training, listed
from .step import Epoch, Step, Turn
from .streams import Streams
from .votes import Vote

# Seconds between two losses that are reported.
_LOSS_EVERY = 5.0


class Session(Asking):
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

    In the loop and after it, all ranks may call `mean`, `all_reduce`, `gather` and `agree`. If a peer is lost, each rank
    gets what it gave, and a step that is not applied yet is done again.

    A model that `fully_shard` or `parallelize_module` divides over `elastic_agent.torch.node_mesh()` has a replica on each
    node, over `replica_mesh(nodes)` on so many. So has one whose stages are a pipeline, by `backward_pass`. A rank is then
    a replica: its workers live and die together. Buffers (such as BatchNorm's statistics) are each rank's own.

    The arguments are the same on every rank. All ranks begin with the parameters of rank 0.

    - optimizer: one, or several whose parameters are the model's.
    - scheduler: a learning rate scheduler, or several. They advance with each step, or with `scheduler_per="epoch"` with
      each epoch; a ReduceLROnPlateau by `step_scheduler`.
    - scaler: a GradScaler, for fp16. A step that it skips counts as done.
    - state: what else belongs to the state, such as an average of the model. The script changes it after a step.
    - on_group: called with the session in each group, before its first step, when all ranks have one state: for example
      to set a learning rate by `world_size`. It changes settings, not tensors: a newcomer may still compare these.
    - checkpoint_dir: a folder that all nodes share. Rank 0 writes a checkpoint there after every `checkpoint_every`
      steps, after the last one, and when a node is asked to leave; the newest `keep_checkpoints` are kept. Steps wait for
      the write, unless there are snapshots: these are written during training. Of a sharded model each rank of the first
      replica writes its part, in the layout of torch.distributed.checkpoint.
    - resume: where a job begins that has committed nothing. "auto": at the newest checkpoint in `checkpoint_dir`;
      "never": at step 0, in a folder without any; else at one of another folder: `DIR` or `DIR@STEP`. A folder belongs
      to one job, whose id is in its file `job`; a job without an id (`--standalone`) takes the folder's.
    - snapshot_every: the state is copied into the agent's memory after this many steps, during the next one. If all
      workers die and an agent lives, training resumes from it.
    - seed: torch's random numbers for a batch depend only on it, the step, and the batch's place among the step's
      samples. Without it rank 0 draws one, and it is part of the state.
    - same_bits: the result is the same to the last bit for any number of ranks, on machines that compute alike. Gradients
      of `micro_batch`es are added in their order, after the backward pass. The sampler must have a `global_batch`.
    - local_steps, outer: each rank does so many steps by itself, with the gradients of its own samples, and then an outer
      step: the ranks take the mean of their parameters (LocalSGD), or give the optimizer that `outer` makes the mean way
      that they have come (DiLoCo). An epoch ends with an outer step, and nodes join and leave after one. If a peer is
      lost, all return to the last one.
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
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        sampler: ElasticBatchSampler | Streams,
        *,
        scheduler: Any = None,
        scheduler_per: str = "step",
        scaler: Any = None,
        state: State | None = None,
        on_group: Callable[[Session], None] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1000,
        keep_checkpoints: int = 2,
        resume: str | os.PathLike[str] = "auto",
        snapshot_every: int | None = None,
        seed: int | None = None,
        same_bits: bool = False,
        name: str = "",
        local_steps: int | None = None,
        outer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
        backend: str | None = None,
        operation_timeout: float = 60,
        loss_timeout: float = 5,
    ) -> None:
        optimizers = listed(optimizer)
        refusals.check(model, optimizers)
        replica = Replica(model)
        refusals.check_group(model, replica)
        refusals.fit(sampler, model, replica, same_bits)
        if scaler is not None and replica.mesh is not None:
            raise ValueError("a GradScaler is for models that every rank holds as a whole: shard in bf16, without one")
        self.model, self.optimizer, self.sampler, self.scheduler = model, optimizer, sampler, scheduler
        refusals.check_local(local_steps, outer, replica, scaler, same_bits)
        self._streams = sampler if isinstance(sampler, Streams) else None
        given = model, optimizer, sampler, scheduler, seed, scheduler_per, scaler, state
        self._local = LocalTraining(*given, steps=local_steps, outer=outer) if local_steps is not None else None
        training = self._local or Training(*given)
        late = functools.partial(Gradients, late=replica.mesh is not None)
        gradients = LocalGradients if self._local else OrderedGradients if same_bits else late
        self._gradients = gradients(model.named_parameters())
        self._trained = refusals.Trained(model, optimizers, replica)
        self._sameness = Sameness(training)
        super().__init__(
            training,
            replica,
            Nccl(list(model.parameters()), backend),
            on_group=on_group,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            resume=resume,
            snapshot_every=snapshot_every,
            name=name,
            operation_timeout=operation_timeout,
            loss_timeout=loss_timeout,
        )
        if self._local:
            # An outer step takes longer than those before it, and ends in time.
            self._members.longest_step = math.inf
        self._loss_read, self._first = -_LOSS_EVERY, True
        # The epochs of a loop that the script has left by itself.
        self._left: int | None = None

    @property
    def in_sync(self) -> bool:
        """Whether all ranks have one model: with `local_steps` after an outer step, else always."""
        return self._training.is_common

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""
        return self.sampler.epoch

    def warm_up(self, loss: Callable[[], torch.Tensor]) -> None:
        """Before the `with`: computes a loss and its gradient, as a step will, while no other rank waits for this one.
        So `torch.compile` compiles, and CUDA starts. Buffers and random numbers are then as before, and no gradient is
        left. For a pipeline the function does a step of the schedule.

        ::

            session = elastic.Session(model, optimizer, sampler)
            session.warm_up(lambda: loss_of(model(images), labels))
            with session:
        """
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        with torch.random.fork_rng():
            computed = loss()
            if self._replica.stages == 1:
                computed.backward()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        self._gradients.clear()

    def steps(self, loader: Any, epochs: int = 1) -> Iterator[Any]:
        """This rank's batches, until `epochs` epochs are done.

        loader: a DataLoader with this session's sampler as its `batch_sampler`, or the session's `Streams`. Give each
        batch to `backward`, and then call `step`. After a change of the group, the session restarts the loader at the
        group's position.
        """
        refusals.check_loader(loader, self.sampler)
        if self._members.completed:
            return
        if self.sampler.epoch >= epochs:
            self._has_no_batch()
            say(
                f"session.steps has nothing left to do: `epochs={epochs}` counts all epochs of the training, and "
                f"{self.sampler.epoch} are done. A loop by epochs is `for epoch in session.epochs(…)`"
            )
        self._close_loop()
        self._settle()
        try:
            yield from self._steps_until(loader, epochs)
        except GeneratorExit:
            # A `break`, perhaps on this rank alone.
            self._left = epochs
            raise

    def _steps_until(self, loader: Any, epochs: int) -> Iterator[Any]:
        while self.sampler.epoch < epochs:
            epoch, batches = self.sampler.epoch, self._batches(loader)
            while self.sampler.epoch == epoch:
                yield from self._batches_of_a_step(loader, batches)
                if self._step.ended:
                    self._clear()
                    self._step = Step([])
                    say(f"another rank has left the loop after step {self.step_number}, and so does this one")
                    return
                if self._follows(epochs):
                    # Batches that were read ahead are another place's.
                    break
                self._members.longest_step = max(0.9 * self._members.longest_step, time.monotonic() - self._step.began)

    def _follows(self, epochs: int) -> bool:
        """What follows a step, in a loop over so many epochs. Returns whether the group is another."""
        if self.sampler.epoch >= epochs and self._step.can_wait and not self._members.departure.asked:
            return False
        return self._changes(loop_ends=self.sampler.epoch >= epochs)

    def _batches(self, loader: Any) -> Iterator[Any]:
        words = f"{self._training.seed} {self.epoch}"
        if self._streams:
            return self._streams.read_for(words)
        self.sampler.batch_of = functools.partial(draws.Batch, seed=words)
        # What a loader's processes draw as they start is another rank's otherwise.
        self._training.seed_for(f"loader {self.sampler.first_place()}")
        return iter(loader)

    def epochs(self, count: int) -> Iterator[Epoch]:
        """The epochs that are left of `count`: for what a script does once an epoch. A worker that comes later begins
        with the one under way.

        ::

            for epoch in session.epochs(10):
                for images, labels in epoch.batches(loader):
                    session.backward(loss_of(model(images), labels))
                    session.step()
        """
        if self.epoch >= count:
            self._has_no_batch()
        while self.epoch < count and not self._members.completed:
            number = self.epoch
            try:
                yield Epoch(number, self)
            except GeneratorExit:
                self._left = count
                raise
            if self.epoch == number:
                raise RuntimeError("an epoch ends when all its steps are done: `for batch in epoch.batches(loader)`")

    def _batches_of_a_step(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        place, reads = self.sampler.first_place(), self._members.departure.reads
        self._members.begin_step()
        # Streams are read here.
        sizes = reads(self.sampler.micro_batches)
        self._step = step = Step(sizes or [0])
        for size in step.batches:
            with draws.kept(loader, f"{self._training.seed} {self.step_number} {place}"):
                batch = sizes and reads(lambda: next(batches))
            if batch is None:
                step.lost = "this worker is asked to leave, and so were the processes that read its batches"
                return
            self._training.seed_for(place)
            place += size
            self._begun = True
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
        if self._replica.stages > 1:
            raise RuntimeError("a pipeline's backward pass is `with session.backward_pass(): schedule.step(…)`")
        share = self._share("session.backward", count)
        self._end_batch(lambda: self._training.scaled(loss * share).backward())
        if self._step.lost is None:
            self._step.loss = loss.detach() if count is None else loss.detach() / max(count, 1)

    @contextlib.contextmanager
    def backward_pass(self, count: float | None = None) -> Iterator[None]:
        """Instead of `backward`, around the step of a pipeline's schedule, on each of its ranks::

            with session.backward_pass():
                schedule.step(*[images] * is_first, target=labels if is_last else None)

        The gradient that the schedule leaves is that of the batch's mean loss, or of the sum over `count`: then give the
        schedule `scale_grads=False`. All batches have `micro_batch` samples."""
        if self._replica.stages == 1:
            raise RuntimeError("session.backward_pass is for a pipeline, of replica_mesh(…, pipeline=STAGES)")
        with self._gradients.counting(self._share("session.backward_pass", count)):
            yield
        self._end_batch(lambda: None)

    def _share(self, called: str, count: float | None) -> float:
        """How much the loss of the batch under way counts, or its gradient. called: how the script asks."""
        step, readers = self._step, self._replica.readers
        step.begin_backward(called, counted=self._streams is not None or count is not None)
        if self._streams:
            # How many samples a step has, the ranks learn with its sum.
            return step.share(count, readers) if count is not None else step.size * step.share(step.size, readers)
        return step.share(count, readers, max(sum(step.batches), 1) if self._local else self.sampler.step_size())

    def _end_batch(self, compute: Callable[[], None]) -> None:
        step = self._step
        if step.done < len(step.batches) - 1:
            self._add(compute)
        elif step.lost is None:
            self._sum_up(compute)
        step.turn, step.done = Turn.STEP, step.done + (step.lost is None)

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
        return self._replica.clip(self.model.parameters(), max_norm)

    def step(self) -> bool:
        """Applies the step, if this was its last batch. Returns whether it was applied: not for an earlier batch, and not
        if a peer is gone; then the step is done again in the next group."""
        complete = self._step.is_complete
        if self._step.turn is Turn.STEP:
            self._step.turn = Turn.NEXT_BATCH
        if not complete:
            return False
        self._trained.check()
        feeds = self._members.feeds
        feeds.before_step()
        self._training.apply(self._step.metric)
        feeds.after_step()
        if self._first:
            # Optimizers have a state now.
            tree.take_apart(self._training.value())
            self._first = False
        self._gradients.clear()
        if self._local and self._local.is_due(changes=any(self._step.votes)) and not self._outer_step():
            return False
        if self.in_sync:
            worker.report_progress(self.step_number, epoch=self.epoch, loss=self._newest_loss())
        return True

    def _outer_step(self) -> bool:
        """Has all ranks come to one model. Returns whether they did: else they are where they were after the last one."""
        group = self._members.group
        try:
            self._disk.may_change()
            self._local.outer_step(group)
            marks = group.gather(int(self._sameness.mark(counted=False)))
            self._sameness.compare(group, marks, counted=False, before=lambda: None)
        except GroupLost as lost:
            self._step.lost = str(lost)
            self._local.restore()
            return False
        self._local.commit()
        return True

    def _add(self, compute: Callable[[], None]) -> None:
        compute()
        self._gradients.keep(first=self.rank == 0)

    def _sum_up(self, compute: Callable[[], None]) -> None:
        """The last backward pass of a step, and the sums over the group."""
        step, group = self._step, self._members.group
        counted = step.count is not None

        def summed() -> tuple[float, ...]:
            computed = self._members.meet_in_first_step(lambda: self._add(compute))
            if self._streams:
                self._streams.hear(group.gather_texts(self._streams.report()))
            mark = self._sameness.mark(counted=counted) if group.size > 1 and not self._local else 0
            changing, leaving = worker.forming() is not None, self._members.departure.asked
            count = (step.count or 0) * self._replica.is_reader
            vote = Vote(changing, leaving, False, count, self._training.metric, mark)
            self._gradients.sum_over(group, vote)
            if not computed:
                self._add(compute)
            self._disk.copied()
            votes = self._gradients.finish()
            if not votes.ended:
                self._sameness.compare(group, votes.marks, counted=counted, before=self._disk.may_change)
            return votes.changing, votes.leaving, votes.ended, votes.count, votes.metrics, votes.metric

        try:
            changing, leaving, ended, count, metrics, metric = self._replica.together(summed)
        except GroupLost as lost:
            step.lost = str(lost)
            return
        step.votes, step.ended = (round(changing), round(leaving)), ended > 0
        step.metric = metric / metrics if metrics else None
        if counted:
            self._gradients.divide(count or 1)
        if self._local and not any(step.batches):
            # Of a batch that does not count.
            self._gradients.clear()
        self._training.unscale()

    def _newest_loss(self) -> float | None:
        """The loss of this rank's newest batch, now and then: to read it waits for the GPU."""
        if self._step.loss is None or time.monotonic() - self._loss_read < _LOSS_EVERY:
            return None
        self._loss_read = time.monotonic()
        return self._step.loss.item()

    def _has_no_batch(self) -> None:
        """A worker that comes after the last step asks others for nothing: they are not where it is."""
        if not self._begun:
            self._begun, self._step = True, Step([], moved=True)

    def _settle(self) -> None:
        """Does what follows the last step of a loop, where that could wait."""
        step = self._step
        if step.batches and not (step.settled or step.moved):
            self._changes()

    def _close_loop(self) -> None:
        """After a `break`, which may be this rank's alone: the others hear of it where they wait for its gradient."""
        if self._left is None:
            return
        epochs, self._left, step = self._left, None, self._step
        if step.is_complete:
            raise RuntimeError("leave a loop before session.backward or after session.step: other ranks apply this step")
        if self.sampler.epoch >= epochs:
            # With its last step, after which all ranks leave it.
            if not step.settled and not step.moved:
                self._follows(epochs)
            return
        if not step.settled and not step.moved and (step.lost is not None or step.done == len(step.batches)):
            self._changes()
        self._step = Step([])
        self._clear()
        while self._members.group.size > 1:
            try:
                self._replica.together(self._say_ended)
                return
            except GroupLost as lost:
                self._next_group(str(lost))

    def _clear(self) -> None:
        self._gradients.clear()
        self._training.forget_gradient()
        if self._local:
            self._local.restore()

    def _tell_group(self) -> None:
        super()._tell_group()
        if self._local:
            self._local.commit()

    def _release(self) -> None:
        self._members.feeds.close()
        self._gradients.remove()
        self.sampler.close()

    def _say_ended(self) -> None:
        self._gradients.clear()
        self._members.meet_in_first_step()
        if self._streams:
            # The others tell where they are.
            self._members.group.gather_texts("null")
        self._gradients.sum_over(self._members.group, Vote(ended=True))
        self._gradients.finish()
        self._gradients.clear()
