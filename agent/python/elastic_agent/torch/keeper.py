"""Copies states into the agent's memory during training, and from it to disk. The callers say what a state is."""

from __future__ import annotations

import json
import mmap
import queue
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import worker
from . import checkpoints
from .neighbours import Neighbours
from .boxes import Layout, is_sharded
from .checkpoints import Folder
from .files import say
from .frozen import Frozen
from .slots import Plan, Slots, Snapshot


@dataclass
class _Copy:
    """A state on its way into a slot."""

    step: int
    round: int
    plan: Plan
    tensors: list[torch.Tensor]
    saves: bool
    versions: list[int] = field(default_factory=list)
    # How often each tensor that seldom changes has changed, by its address.
    changes: dict[int, int] = field(default_factory=dict)
    # Set when all numbers of a GPU are on the host.
    moved: Any = None
    done: threading.Event = field(default_factory=threading.Event)
    # Set when the neighbours have it, too.
    over: threading.Event = field(default_factory=threading.Event)


class Keeper:
    """The snapshots of one worker.

    A thread copies a snapshot while the next step computes. What only an optimizer changes may be copied late: `wait`
    holds the optimizer up until that is done. All else is copied at once.
    """

    def __init__(
        self,
        facts: dict[str, Any],
        *,
        optimizers: Iterable[Any],
        folder: Folder | None,
        every: int = 1,
        sharded: bool = False,
        layout: Layout | None = None,
        frozen: Frozen | None = None,
    ) -> None:
        """facts: identify this training; kept with each snapshot. folder: where snapshots go on
        disk; the agent has what is in memory written there when no worker is left to resume from it. every: steps from
        one snapshot to the next. sharded: whether each rank has a part of the state; layout: which, if all tensors are
        divided alike. frozen: what is copied once."""
        self._frozen = frozen
        self._facts, self._folder = facts, folder
        self._sharded, self._layout = sharded, layout
        self._neighbours: Neighbours | None = None
        # The parts of another rank, whose neighbour this one is.
        self._copies_of: Slots | None = None
        self._optimizers: list[Any] = []
        self._hooks: list[Any] = []
        self._rescue: list[str] = []
        # Of a sharded state one memory holds a part alone.
        if folder and not sharded:
            self._rescue = [sys.executable, "-m", "elastic_agent.torch.rescue", "--dir", str(folder.path)]
        self._slots: Slots | None = None
        self._refused = False
        self._changes: dict[int, int] = {}
        self._copy: _Copy | None = None
        self._copies: queue.SimpleQueue[_Copy] = queue.SimpleQueue()
        # The steps of the newest snapshot, and of the newest on disk.
        self._every, self._taken, self._saved = every, 0, 0
        self._saving: Snapshot | None = None
        # The step of the newest checkpoint that this has written and committed.
        self.committed = -1
        self._saver: threading.Thread | None = None
        self._pinned: list[torch.Tensor] = []
        self._stream: Any = None
        for one in optimizers:
            self.watch(one)
        threading.Thread(target=self._work, name="elastic-snapshots", daemon=True).start()

    def watch(self, optimizer: Any) -> None:
        """Makes this optimizer wait, before each of its steps, until the tensors that it changes are copied."""
        self._optimizers.append(optimizer)
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.wait()))

    def held(self) -> list[Snapshot]:
        """The whole and undamaged snapshots of this training that an earlier worker has left, the newest first."""
        if not worker.available():
            return []
        try:
            memory = worker.memory(0)
        except worker.AgentError:
            return []  # The first worker of this local rank, or an agent that cannot spare any.
        left = [Slots(memory)]
        if self._sharded:
            # An earlier group may have kept copies of neighbours' parts, or not.
            left += [Slots(memory, share, 2) for share in (0, 1)]
        else:
            self._slots = left[0]
        found: dict[int, Snapshot] = {}
        for one in (one for slots in left for one in slots.whole()):
            try:
                if one.facts != self._facts:
                    raise ValueError(
                        f"the snapshot of step {one.step} in memory is of another training: {json.dumps(one.facts)}, "
                        f"this is {json.dumps(self._facts)}"
                    )
                one.check()
                found[one.at] = one
            except ValueError as error:
                one.drop()
                say(f"{error}; it is skipped")
        return sorted(found.values(), key=lambda one: one.count, reverse=True)

    def share_with(self, neighbours: Neighbours | None) -> None:
        """Copies later snapshots also to another node's memory. All ranks then call `take` at the same steps."""
        self._neighbours = neighbours

    def began(self, step: int) -> None:
        """Training continues from this step: what is due next counts from here."""
        self._taken = self._saved = step

    def due(self, step: int) -> bool:
        """Whether a snapshot is due after this step."""
        return step - self._taken >= self._every

    def take(self, step: int, round_: int, state: Any, place: tuple[int, int], *, saves: bool) -> bool:
        """Begins to copy a state of `step` steps. Whether it did: not while another is copied, or if the node cannot
        spare the memory. place: this rank, and the number of ranks. saves: whether this rank writes to disk what is
        due there, or its part of it."""
        if self._copy and self._neighbours:
            # Ranks that skipped different steps would be left without a step that all have.
            self._copy.over.wait()
        # Without the agent's memory there is still the disk.
        private = saves and self._folder is not None
        if (self._refused and not private) or (self._copy and not self._copy.done.is_set()):
            return False
        plan = Plan(state, self._facts, place, self._layout)
        if plan.is_sharded and not self._sharded:
            if not self._refused:
                say(
                    "no snapshots are taken: the state holds sharded tensors, and only elastic_agent.torch.Snapshots "
                    "that are given the sharded model itself keep each rank's part"
                )
            self._refused = True
            return False
        if not (self._slots and self._slots.fits(plan)):
            shares = 2 if self._neighbours else 1
            memory = self._memory(shares * plan.memory_bytes(), private=private)
            if memory is None:
                self._share(None, None)
                return False
            self._slots = Slots(memory, 0, shares)
            # What dies with this worker is no copy.
            self._copies_of = None if self._refused else Slots(memory, shares - 1, shares)
        self._copy = copy = _Copy(step, round_, plan, plan.tensors, saves)
        self._detach(copy)
        self._copies.put(copy)
        self._taken = step
        return True

    def wait(self) -> None:
        """Returns when the state that is copied may change. On a GPU it is the stream that waits, not this thread."""
        copy = self._copy
        if copy is None:
            return
        if copy.moved is not None:
            torch.cuda.current_stream().wait_event(copy.moved)
        if any(version >= 0 for version in copy.versions):
            copy.done.wait()

    def copied(self, timeout: float) -> None:
        """Waits until what is under way is in memory, for `timeout` seconds at most."""
        if self._copy:
            self._copy.over.wait(timeout)

    def settle(self, timeout: float) -> None:
        """Waits until what is under way is copied and saved, for `timeout` seconds at most for each."""
        self.copied(timeout)
        if self._saver:
            self._saver.join(timeout)

    def close(self, *, forget: bool) -> None:
        """Ends the copying. `forget`: no worker will resume from what is in memory."""
        for hook in self._hooks:
            hook.remove()
        if self._copy:
            self._copy.over.wait()
        if self._neighbours:
            self._neighbours.leave()
        if forget and worker.available():
            try:
                worker.forget_memory()
            except worker.AgentError:
                pass  # It is gone, and the memory with it.

    def _memory(self, size: int, *, private: bool) -> mmap.mmap | None:
        try:
            return worker.memory(size, rescue=self._rescue)
        except worker.AgentError as error:
            if not self._refused:
                say(f"no snapshots outlive this worker: {error}")
            self._refused = True
            return mmap.mmap(-1, size) if private else None

    def _detach(self, copy: _Copy) -> None:
        """Leaves to the thread what no one changes before an optimizer's step. All else is copied here."""
        copy.changes = self._frozen.changes() if self._frozen else {}
        # What has just changed may change again.
        still = {at for at, changes in copy.changes.items() if self._changes.get(at) == changes}
        self._changes = copy.changes
        late = self._changed_by_optimizers()
        if any(one.is_cuda for one in copy.tensors):
            self._to_host(copy, late)
        for number, one in enumerate(copy.tensors):
            beside = not one.is_inference() and (_storage(one) in late or one.data_ptr() in still)
            copy.versions.append(one._version if beside else -1)
            if not beside and copy.moved is None:
                copy.tensors[number] = one.clone()

    def _changed_by_optimizers(self) -> set[int]:
        found = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found.add(_storage(parameter))
            for values in optimizer.state.values():
                found.update(_storage(one) for one in values.values() if isinstance(one, torch.Tensor))
        return found

    def _to_host(self, copy: _Copy, late: set[int]) -> None:
        """Begins to bring a GPU's numbers to pinned memory, beside its work: first those that the next forward pass may
        change, which its stream waits for. It has not run on a GPU."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        if [(one.shape, one.dtype) for one in self._pinned] != [(one.shape, one.dtype) for one in copy.tensors]:
            self._pinned = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in copy.tensors]
        self._stream.wait_stream(torch.cuda.current_stream())
        sources, copy.tensors = copy.tensors, list(self._pinned)
        order = sorted(range(len(sources)), key=lambda number: _storage(sources[number]) in late)
        soon = sum(_storage(one) not in late for one in sources)
        with torch.cuda.stream(self._stream):
            for at, number in enumerate(order):
                self._pinned[number].copy_(sources[number], non_blocking=True)
                if sources[number].is_cuda:
                    # The allocator must not give this memory to another tensor meanwhile.
                    sources[number].record_stream(self._stream)
                if at == soon - 1:
                    torch.cuda.current_stream().record_event(first := torch.cuda.Event())
            copy.moved = self._stream.record_event()
        if soon:
            torch.cuda.current_stream().wait_event(first)

    def _work(self) -> None:
        while True:
            copy, snapshot = self._copies.get(), None
            try:
                snapshot = self._fill(copy)
            except Exception as error:  # noqa: BLE001: training continues without this snapshot, whatever the error.
                say(f"no snapshot of step {copy.step}: {error}")
            copy.done.set()
            self._share(snapshot, self._copies_of)
            copy.over.set()

    def _share(self, snapshot: Snapshot | None, copies: Slots | None) -> None:
        neighbours = self._neighbours
        if neighbours is None:
            return
        try:
            continues, why = neighbours.share(snapshot, copies), "a rank has no memory for snapshots"
        except Exception as error:  # noqa: BLE001: a peer is gone; training ends, or continues without copies.
            continues, why = False, str(error).partition("\n")[0]
        if not continues:
            self._neighbours = None
            neighbours.leave()
            say(f"later parts are not copied to another node: {why}")

    def _fill(self, copy: _Copy) -> Snapshot:
        if copy.moved is not None:
            copy.moved.synchronize()
        place = self._slots.begin(self._saving)
        self._slots.fill(place, copy.step, copy.round, copy.plan, copy.tensors, copy.changes)
        for one, version in zip(copy.tensors, copy.versions):
            if version >= 0 and copy.moved is None and one._version != version:
                raise RuntimeError(
                    "a tensor was changed while it was copied: only the optimizers that the snapshots know may change "
                    "parameters, others call wait() first"
                )
        snapshot = self._slots.complete(place)
        if copy.saves and self._folder and copy.step - self._saved >= self._folder.every:
            self._begin_save(snapshot)
        return snapshot

    def _begin_save(self, snapshot: Snapshot) -> None:
        """Has a snapshot written beside training; a later one, if one is being written. But all ranks write the same
        steps of a sharded state: so this waits."""
        if self._sharded and self._saving:
            self._saver.join(self._folder.timeout)
            if self._saving:
                say(f"step {snapshot.step} is not saved: the disk is still at step {self._saving.step}")
                self._saved = snapshot.step
        if self._saving is None:
            self._saving, self._saved = snapshot, snapshot.step
            self._saver = threading.Thread(target=self._save, args=(snapshot,), name="elastic-checkpoint", daemon=True)
            self._saver.start()

    def _save(self, snapshot: Snapshot) -> None:
        """Writes what a slot holds. No copy takes that slot meanwhile."""
        folder, step, round_ = self._folder, snapshot.step, snapshot.round
        try:
            if self._layout is None:
                checkpoints.save(folder, snapshot.state(), step, round_)
            else:
                described = snapshot.description, snapshot.tensors()
                checkpoints.save_part(folder, self._layout, described, step, round_, leads=snapshot.rank == 0)
            self.committed = step
        except (OSError, RuntimeError, ValueError, worker.AgentError) as error:
            say(f"the checkpoint of step {snapshot.step} is not saved: {error}")
        finally:
            self._saving = None


def _storage(tensor: torch.Tensor) -> int:
    """Identifies the memory that a tensor uses. Of a sharded tensor: the memory of this rank's part."""
    local = tensor.to_local() if is_sharded(tensor) else tensor
    return local.untyped_storage().data_ptr()
