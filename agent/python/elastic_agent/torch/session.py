"""A training loop that lives through changes of its group in one process.

    joined ──▶ a step: micro-batches, sums, votes ──▶ applied ──▶ the next step …
                   │ a peer is gone                     │ the ranks have voted for a change
                   ▼                                    ▼
               the group is left ──▶ quiesced ──▶ the next round's place ──▶ joined: the furthest rank's state for all
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch

from .. import worker
from ..batches import ElasticBatchSampler
from . import checkpoints, state, tree
from .checkpoints import Folder
from .gradients import Gradients
from .group import Group, GroupLost
from .keeper import Keeper, local_rank, say
from .nccl import Nccl
from .ordered import OrderedGradients
from .replica import Replica
from .snapshots import fingerprint

# What a shell sees of a process that SIGTERM ended. The agent knows that it asked for that.
_STOPPED = 128 + signal.SIGTERM
# Seconds to wait for a worker that may bring the newest state back.
_RETURN = 60.0
# Seconds between two losses that are reported.
_LOSS_EVERY = 5.0


class Session:
    """The training of one model on a group of ranks that may change at any time.

    ::

        sampler = elastic.ElasticBatchSampler(dataset, global_batch=256)
        loader = DataLoader(dataset, batch_sampler=sampler)
        with elastic.Session(model, optimizer, sampler) as session:
            for images, labels in session.steps(loader, epochs=10):
                session.backward(loss_of(model(images), labels))
                session.step()

    What it promises, at whatever time workers die or join:

    - A step is applied on every rank, or on none and done again. Ranks that miss a step get the state of one that has it.
    - Each sample is used once in an epoch: by exactly one step, on exactly one rank.
    - A rank's process and model stay, unless it is that rank that dies.
    - A step's gradient is the mean over the samples of its global batch, whatever the number of ranks. Only the order in
      which gloo adds changes with it, and so the last bits: `same_bits` adds in one order.

    Every step on a rank that later turns out to be the furthest one left counts as done. If all ranks die, training
    resumes from the last committed checkpoint.

    The model's buffers (such as BatchNorm's statistics) are each rank's own; a newcomer gets those of a rank that sends
    them. Under no agent it trains alone.

    A model that `fully_shard` divides over `elastic_agent.torch.node_mesh()` has a replica on each node. What is said
    of a rank is then true of a node: its workers live and die as one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: ElasticBatchSampler,
        *,
        scheduler: Any = None,
        on_group: Callable[[Session], None] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1000,
        keep_checkpoints: int = 2,
        snapshot_every: int | None = None,
        seed: int | None = None,
        same_bits: bool = False,
        backend: str | None = None,
        operation_timeout: float = 60,
        loss_timeout: float = 5,
    ) -> None:
        """The model and what trains it, as every rank makes them. All ranks begin with those of rank 0.

        scheduler: a learning rate scheduler; it advances with each step.
        on_group: called with the session in each group, before its first step, when all ranks have one state: such as to
        set the learning rate by `world_size`, where the sampler has a `rank_batch`.
        checkpoint_dir: a folder that all nodes share. Rank 0 writes a checkpoint there after every `checkpoint_every`
        steps, and when a node is asked to leave; the newest `keep_checkpoints` are kept. Steps wait for the write, unless
        there are snapshots: then these are written, beside the steps. Of a sharded model each rank of the first node
        writes its part, in the layout of torch.distributed.checkpoint.
        snapshot_every: if given, the state is copied into the agent's memory after this many steps, beside the next one.
        It outlives the workers: when all of them die and an agent lives, training resumes from there.
        seed: torch's random numbers for a batch depend only on it, the step, and the batch's place among the step's
        samples: dropout does the same when a step is done again. If none is given, rank 0 draws one in the beginning, and
        it is part of the state.
        same_bits: the result is the same to the last bit whatever the number of ranks, on machines that compute
        alike. The sampler's `micro_batch` says what is computed at once, and the gradients of these are added in
        their order: in a chain through the ranks, after the backward pass. The sampler must have a `global_batch`.
        backend: what sums the gradients: "nccl", "gloo", or None for NCCL where the parameters are on a GPU and all ranks
        can, else gloo. Without NCCL, data on a GPU goes through the hosts, and a line says why. The rest uses gloo.
        operation_timeout: seconds that one exchange between ranks may take, and that a group may take to meet gloo.
        loss_timeout: seconds to wait for a round after the group is broken. If none forms by then, no node has died that
        the agents know of: this worker asks for a round, which costs the job a restart.
        """
        if keep_checkpoints < 1 or checkpoint_every < 1 or (snapshot_every is not None and snapshot_every < 1):
            raise ValueError("checkpoint_every, keep_checkpoints and snapshot_every are 1 or more")
        self._replica = Replica(model)
        if self._replica.mesh is not None:
            sampler.alike = True
        if same_bits:
            if self._replica.mesh is not None:
                raise ValueError("same_bits is for models that every rank holds as a whole, not for sharded ones")
            if sampler.rank_batch is not None or sampler.micro_batch >= sampler.global_batch:
                raise ValueError(
                    "same_bits needs a sampler with a global_batch, and a smaller micro_batch: such as global_batch "
                    "divided by the most ranks there will be"
                )
            sampler.in_pieces = True
        self.model, self.optimizer, self.sampler, self.scheduler = model, optimizer, sampler, scheduler
        self.step_number = 0
        self._on_group = on_group
        self._folder: Folder | None = None
        if checkpoint_dir is not None:
            path = pathlib.Path(checkpoint_dir).absolute()
            self._folder = Folder(path, checkpoint_every, keep_checkpoints, operation_timeout, self._replica.word)
        self._given_seed, self._seed = seed, torch.initial_seed() if seed is None else seed
        # torch.manual_seed costs a tenth of a millisecond for devices that are not in use: it keeps the stack for each.
        on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        self._set_seed = torch.default_generator.manual_seed if on_cpu else torch.manual_seed
        self._operation_timeout, self._loss_timeout = operation_timeout, loss_timeout
        self._gradients = (OrderedGradients if same_bits else Gradients)(model.parameters())
        self._nccl = Nccl(list(model.parameters()), backend)
        self._group: Group | None = None
        self._place: dict[str, Any] = {}
        # The step of the newest snapshot.
        self._snapshot = 0
        # Whether the state is the group's, not just what this rank began with.
        self._held = False
        # The step of the furthest state that this rank knows of. Perhaps no rank has it any more.
        self._known = -1
        self._snapshot_every = snapshot_every
        self._keeper: Keeper | None = None
        self._leaving = False
        # Whether it waits for the agent, and nothing is lost if it ends at once.
        self._at_rest = False
        # The newest step of which a checkpoint was written, or tried.
        self._saved = -1
        self._process = os.getpid()
        self._former_handler: Any = None
        # Of the step under way: this rank's batches, how many are done, and the share that each has in the mean.
        self._batches: list[int] = []
        self._done = 0
        self._lost: GroupLost | None = None
        self._votes = (0, 0)
        self._stepped = True
        self._longest = 0.0
        self._loss: torch.Tensor | None = None
        self._loss_read = -_LOSS_EVERY

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""
        return self.sampler.epoch

    @property
    def rank(self) -> int:
        """This worker's rank in the round under way."""
        return self._place["rank"]

    @property
    def world_size(self) -> int:
        """The number of ranks in the round under way."""
        return self._place["world_size"]

    def __enter__(self) -> Session:
        if threading.current_thread() is threading.main_thread():
            self._former_handler = signal.signal(signal.SIGTERM, self._asked_to_leave)
        self._at_rest = True
        if worker.available():
            worker.on_round_change(self._round_forms)
            place = worker.ready()
            self._look_at_memory()
        elif os.environ.get("WORLD_SIZE", "1") == "1":
            place = {"rank": 0, "world_size": 1, "round": 0, "checkpoint": None}
        else:
            raise worker.AgentError(
                "WORLD_SIZE is set, but elastic-agent has not started this process: start it by elastic-agent, or by "
                "itself"
            )
        try:
            self._enter(place)
        except GroupLost as lost:
            self._lost = lost
            self._next_group()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError):
            self._replica.end_with_the_others(error)
        try:
            if kind is None:
                self._finish_together()
        finally:
            group, self._group = self._group, None
            if group:
                group.close()
            if self._keeper:
                self._keeper.close(forget=kind is None)
            self._gradients.remove()
            if self._former_handler is not None:
                signal.signal(signal.SIGTERM, self._former_handler)

    def steps(self, loader: Any, epochs: int = 1) -> Iterator[Any]:
        """This rank's batches, until `epochs` epochs are done.

        loader: a DataLoader with this session's sampler as its `batch_sampler`. Each batch must be given to `backward`,
        and `step` be called after it. After a change of the group, the session restarts the loader at the group's
        position.
        """
        if getattr(loader, "batch_sampler", None) is not self.sampler:
            raise ValueError("the loader must have the session's sampler: DataLoader(dataset, batch_sampler=sampler)")
        while self.sampler.epoch < epochs:
            # The loader draws a number from which its processes seed themselves.
            self._seed_for("loader")
            epoch, batches = self.sampler.epoch, iter(loader)
            while self.sampler.epoch == epoch:
                began = time.monotonic()
                place = self.sampler.first_place()
                for done, size in enumerate(self._begin_step()):
                    self._stepped = False
                    self._seed_for(place)
                    place += size
                    yield next(batches)
                    if not self._stepped or (not self._lost and self._done <= done):
                        raise RuntimeError("call session.backward(loss) and then session.step() for each batch")
                    if self._lost:
                        break
                if self._changes():
                    # Batches that were read ahead are another place's.
                    break
                self._longest = max(0.9 * self._longest, time.monotonic() - began)

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradient of this batch's mean loss. After the last batch of the step it returns with the whole group's
        gradient in the parameters, where it can be clipped."""
        if self._lost or self._done >= len(self._batches):
            raise RuntimeError("session.backward is for a batch of session.steps, once for each")
        # A sharded model's gradients are means over the ranks of its replica.
        share = self._batches[self._done] * self._replica.size / self.sampler.step_size()
        if self._done < len(self._batches) - 1:
            self._add(loss * share)
        else:
            self._sum_up(lambda: self._add(loss * share))
        if not self._lost:
            self._loss = loss.detach()
            self._done += 1

    def step(self) -> bool:
        """Applies the step, if this was its last batch. Whether it did: not for an earlier batch, and not if a peer is
        gone; then the step is done again in the next group."""
        self._stepped = True
        if self._lost or self._done < len(self._batches):
            return False
        self._apply()
        return True

    def _begin_step(self) -> list[int]:
        self._batches, self._done, self._lost, self._votes = self.sampler.micro_batches(), 0, None, (0, 0)
        return self._batches

    def _seed_for(self, what: int | str) -> None:
        self._set_seed(random.Random(f"{self._seed} {self.step_number} {what}").getrandbits(63))

    def _add(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._gradients.keep(first=self.rank == 0)

    def _sum_up(self, backward: Callable[[], None]) -> None:
        """The last backward pass of a step, and the sums over the group."""

        def summed() -> tuple[int, int]:
            self._gradients.sum_over(self._group, changing=self._knows_of_change(), leaving=self._leaving)
            backward()
            if self._keeper and self._replica.mesh is not None:
                # Then all ranks of the replica have the former snapshot, when the next is begun.
                self._keeper.copied(self._operation_timeout)
            return self._gradients.finish()

        try:
            self._votes = self._replica.together(summed)
        except GroupLost as lost:
            self._lost = lost

    def _apply(self) -> None:
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self._gradients.clear()
        self.sampler.advance()
        self.step_number += 1
        if self._keeper and self.step_number - self._snapshot >= self._snapshot_every:
            place = self.rank, self.world_size
            saves = self._replica.is_first(self.rank)
            if self._keeper.take(self.step_number, self._place["round"], self._state(), place, saves=saves):
                self._snapshot = self.step_number
        worker.report_progress(self.step_number, epoch=self.sampler.epoch, loss=self._newest_loss())

    def _newest_loss(self) -> float | None:
        """The loss of this rank's newest batch, now and then: to read it waits for the GPU."""
        if self._loss is None or time.monotonic() - self._loss_read < _LOSS_EVERY:
            return None
        self._loss_read = time.monotonic()
        return self._loss.item()

    def _knows_of_change(self) -> bool:
        return worker.forming() is not None

    def _changes(self) -> bool:
        """After a step: goes into the next group if this one changes. Whether it did."""
        changing, leaving = self._votes
        if not self._lost and leaving == 0 and changing == 0:
            if self._folder and not self._keeper and self.step_number % self._folder.every == 0:
                self._save_by_rank_0()
            return False
        if not self._lost:
            if leaving:
                # The others may be asked to leave in the next moment, and then no worker has the state.
                self._save_by_rank_0()
            if self._leaving:
                sys.exit(_STOPPED)
        self._next_group()
        return True

    def _next_group(self) -> None:
        """Leaves the group, and enters the next round's."""
        while True:
            if self._group:
                self._group.close()
                self._group = None
            self._gradients.clear()
            if self._leaving:
                self._leave()
            if not worker.available():
                raise RuntimeError("the group is lost, and there is no agent that forms another") from self._lost
            self._at_rest = True
            try:
                if not worker.forms_within(self._loss_timeout):
                    worker.request_round(f"its group is broken: {self._lost or 'a change that did not come'}")
                # The agent bounds this wait: by join_timeout, and its own end.
                place = worker.quiesce(self.step_number)
            except SystemExit:
                self._leave()
            except worker.AgentError as error:
                raise worker.AgentError(f"{error}; the group was left because: {self._lost or 'it changes'}") from error
            try:
                self._enter(place)
                return
            except GroupLost as lost:
                self._lost = lost

    def _enter(self, place: dict[str, Any]) -> None:
        """Joins the ranks of a round, and comes to one state with them."""
        self._at_rest, self._place = False, place
        self.sampler.set_place(place["rank"], place["world_size"])
        self._group = Group(self._replica.peers(place))
        found: list[Any] = []
        self._replica.together(lambda: found.append(self._meet_and_agree()))
        (loaded,) = found
        if loaded is not None:
            self._load(loaded)
        self._held = True
        if self._on_group is not None:
            self._on_group(self)
        self._lost = None

    def _meet_and_agree(self) -> Any:
        """Gives all ranks the state of the furthest: the newest in memory, else the committed checkpoint, else what rank
        0 began with. Returns what this rank is to load, None if it has that state."""
        self._group.join(timeout=self._operation_timeout, outdated=self._knows_of_change, nccl=self._nccl)
        group, checkpoint = self._group, self._place.get("checkpoint")
        held = group.gather(self.step_number + 1 if self._held else 0)
        newest = max(held) - 1
        holders = [rank for rank, step in enumerate(held) if step - 1 == newest]
        self._hope_for_memory(max(newest, -1 if checkpoint is None else checkpoint["step"]))
        if checkpoint is not None and newest < checkpoint["step"]:
            holders = [0]
            if group.rank == 0:
                self._load(checkpoints.read(checkpoint, self._replica.layout, lambda _: self._replica.mesh))
        elif newest < 0:
            holders = [0]
        receivers = [rank for rank in range(group.size) if rank not in holders]
        if group.rank in receivers:
            return state.receive(group, holders, self._replica.mesh)
        if receivers:
            state.send(group, self._state(), holders, receivers)
        return None

    def _hope_for_memory(self, newest: int) -> None:
        """The rank with a state newer than `newest` died before another rank had it. With snapshots it is still in its
        agent's memory, and comes back with the worker in its place: that is worth waiting for."""
        known = max(self._group.gather(self._known + 1)) - 1
        self._known = max(newest, known)
        if newest < known and self._snapshot_every is not None:
            say(f"no rank here has step {known}: waiting {_RETURN:.0f} s for the worker whose agent holds its snapshot")
            if worker.forms_within(_RETURN):
                raise GroupLost("the rank that had the newest state may come back")
            self._known = newest

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step_number,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "sampler": self.sampler.state_dict(),
            "seed": self._seed,
        }

    def _look_at_memory(self) -> None:
        """Takes up what an earlier worker has left in the agent's memory. It is then a state that this rank holds, as
        one of its own steps: the furthest rank's counts."""
        if self._snapshot_every is None or (local_rank() != 0 and self._replica.mesh is None):
            return
        facts = {"session": [fingerprint(self.model), self.sampler.facts()]}
        mesh = self._replica.mesh
        if mesh is not None:
            facts["part"] = [local_rank(), self._replica.size]
        self._keeper = Keeper(
            facts,
            optimizers=[self.optimizer],
            folder=self._folder,
            rescued=True,
            sharded=mesh is not None,
            layout=self._replica.layout,
        )
        held = {(one.step, one.round): one for one in self._keeper.held()}
        newest = self._replica.common(held)
        if newest is not None:
            self._load(held[newest].copy(lambda _: mesh))
            self._held = True

    def _load(self, loaded: dict[str, Any]) -> None:
        if self._keeper:
            self._keeper.wait()
        # First what refuses a state of another training.
        self.sampler.load_state_dict(loaded["sampler"])
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(loaded["scheduler"])
        if self._given_seed is None:
            self._seed = loaded["seed"]
        self.step_number = self._snapshot = loaded["step"]
        if self._keeper:
            self._keeper.began(self.step_number)

    def _leave(self) -> NoReturn:
        """Ends this worker, which was asked to leave and is in no group. Perhaps no other worker has its state."""
        self._at_rest = False
        if self._held and self._saved < self.step_number:
            # Others that leave now write theirs.
            self._save(f"-rank-{self.rank}", leads=local_rank() == 0)
        sys.exit(_STOPPED)

    def _save_by_rank_0(self) -> None:
        """Has rank 0 write a checkpoint; of a sharded model its whole replica."""
        self._saved = self.step_number
        if self._replica.is_first(self.rank):
            self._save(leads=self.rank == 0)

    def _save(self, note: str = "", *, leads: bool) -> None:
        """Writes and commits a checkpoint. Training outlives a disk that is full."""
        if self._folder is None:
            return
        if self._keeper:
            # What is written beside the steps, and is older, must not be committed after this.
            self._keeper.settle(self._operation_timeout)
        step, round_, layout = self.step_number, self._place["round"], self._replica.layout
        try:
            if layout is None:
                checkpoints.save(self._folder, self._state(), step, round_, note)
            else:
                described = tree.take_apart(self._state())
                checkpoints.save_part(self._folder, layout, described, step, round_, leads=leads)
        except (OSError, ValueError, worker.AgentError) as error:
            say(f"the checkpoint of step {step} is not saved: {error}")

    def _finish_together(self) -> None:
        """Waits until every rank has done the last step: one that has not needs the state of another."""
        while True:
            try:
                self._replica.together(self._meet_at_the_end)
                return
            except GroupLost as lost:
                self._lost = lost
                self._next_group()

    def _meet_at_the_end(self) -> None:
        self._group.gather(self.step_number)

    def _asked_to_leave(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A DataLoader's worker has inherited this.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._leaving = True
        if self._at_rest or not self._held:
            sys.exit(_STOPPED)

    def _round_forms(self, round_: int, reason: str) -> None:
        until = time.monotonic() + min(worker.quiesce_time() / 2, max(1.0, 3 * self._longest))
        threading.Thread(target=self._end_stuck_step, args=(round_, until), name="elastic-session", daemon=True).start()

    def _end_stuck_step(self, round_: int, until: float) -> None:
        """Cuts the group that round `round_` replaces, if it is still at work after `until`: a peer is silent, and no
        connection says so. A step that ends in time is let be, so that a planned change repeats nothing."""
        while (group := self._group) is not None and group.round < round_:
            if time.monotonic() > until:
                group.cut()
            time.sleep(0.02)
