"""Snapshots in the agent's memory, for a training loop that starts again at every change: it resumes from its last steps.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from .. import worker
from . import parts as sharded_parts
from . import beginning, checkpoints
from .choice import Choice, Offer, choose
from .checkpoints import Folder
from .keeper import Keeper, say
from .neighbours import Neighbours, neighbours_of
from .boxes import Layout, is_sharded, layout_of
from .furthest import broadcast
from .slots import Snapshot


@dataclass(frozen=True)
class Resumed:
    """Where training resumes: after `step` steps, with what the script gave to `take` besides. source: "memory" or
    "checkpoint"."""

    step: int
    more: dict[str, Any] = field(default_factory=dict)
    source: str = "memory"


class Snapshots:
    """The states of a model and of what trains it, copied during training into memory of this node's agent.

    ::

        snapshots = elastic.Snapshots({"model": model, "optimizer": optimizer}, every=10)
        resumed = snapshots.resume()              # after init_process_group, on every rank
        step = resumed.step if resumed else 0
        for batch in ...:
            ...
            optimizer.step()
            step += 1
            snapshots.take(step, epoch=epoch)

    The memory outlives the workers. When they start again, `resume` has all ranks agree on the newest whole snapshot, and
    gives it to those that have none. It is lost with the agent: if no node of the job is left, there are checkpoints.

    Under DDP the first worker of each node keeps the state. Of a sharded model (FSDP2) every rank keeps its part, and a
    copy of the part of a rank on another node: one node may be lost. A group of another size divides the parts again.
    Under HSDP each replica has all parts, and no copies are needed.

    Without an agent it does nothing.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        *,
        every: int = 1,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1000,
        keep_checkpoints: int = 2,
        resume: str | os.PathLike[str] = "auto",
        timeout: float = 60,
    ) -> None:
        """parts: a model, optimizers, schedulers, a sampler, anything with `state_dict` and `load_state_dict`, by name.
        They hold tensors, numbers, text, lists, tuples and dicts.
        every: a snapshot is taken after this many steps.
        checkpoint_dir: a folder that all nodes see. Rank 0 writes a snapshot there about every `checkpoint_every` steps,
        during training, and commits it; the newest `keep_checkpoints` stay. If the job ends while all workers are dead,
        the newest snapshot is written there, too. Of a sharded model every rank writes its part, in the layout of
        torch.distributed.checkpoint; at the job's end nothing more is written.
        resume: where a job begins that has committed nothing, as for a `Session`.
        timeout: seconds that a commit may take, and that the ranks' parts may come after each other."""
        if every < 1 or checkpoint_every < 1 or keep_checkpoints < 1:
            raise ValueError("every, checkpoint_every and keep_checkpoints are 1 or more")
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise TypeError(
                    f"the part {name!r} is a {type(part).__qualname__}, without state_dict and load_state_dict"
                )
        self._parts, self._timeout = dict(parts), timeout
        modules = [part for part in parts.values() if isinstance(part, torch.nn.Module)]
        self._meshes = _meshes(modules)
        self._layout = layout_of(pair for module in modules for pair in module.named_parameters())
        if self._meshes and self._layout is None and checkpoint_dir is not None:
            raise ValueError(
                "checkpoint_dir is for a model that is whole on every rank, or sharded over one device mesh: write "
                "this one by torch.distributed.checkpoint"
            )
        folder = None
        if checkpoint_dir is not None:
            path = pathlib.Path(checkpoint_dir).absolute()
            folder = Folder(path, every=checkpoint_every, keep=keep_checkpoints, timeout=timeout)
        self._folder, self._begins = folder, beginning.Beginning(folder and folder.path, resume)
        self._keeper: Keeper | None = None
        if worker.available() and (self._meshes or worker.local_rank() == 0):
            optimizers = [part for part in parts.values() if isinstance(part, torch.optim.Optimizer)]
            self._keeper = Keeper(
                self._facts(),
                optimizers=optimizers,
                folder=folder,
                every=every,
                sharded=bool(self._meshes),
                layout=self._layout,
            )

    def resume(self, newer_than: int = 0) -> Resumed | None:
        """Loads the newest state into the parts, the same on every rank: from memory, else from the committed checkpoint
        if there is a `checkpoint_dir`. None if there is neither. Every rank calls this, after `init_process_group` if
        there are several, and before the first `take`.

        newer_than: the step of a checkpoint that the script has loaded itself. No older state is loaded."""
        if not worker.available():
            return None
        held = self._keeper.held() if self._keeper else []
        checkpoint = worker.assignment()["checkpoint"] if self._folder else None
        ranks = _Ranks()
        try:
            offers = [
                Offer(one.step, one.round, bool(self._meshes), one.rank, one.world_size, one.layout) for one in held
            ]
            mine = _Told(offers, self._layout, int(os.environ.get("GROUP_RANK", "0")), secrets.token_hex(4))
            told = ranks.gather(mine)
            if self._folder:
                self._folder.writers = told[0].word
            committed = checkpoint["step"] if checkpoint else None
            layouts = [one.layout for one in told]
            choice = choose([one.offers for one in told], committed, newer_than, layouts)
            if choice.source == "nothing" and not checkpoint:
                checkpoint, choice = self._begin(ranks, choice, newer_than)
            try:
                loaded = self._loaded(choice, held, checkpoint, ranks, layouts)
            except ValueError as error:
                if choice.senders is None:
                    raise
                choice = replace(choose([], committed, newer_than), why=str(error))
                loaded = self._loaded(choice, held, checkpoint, ranks, layouts)
            for one in held:
                # Of a time that training has left: it must not be taken for what comes next.
                if choice.source != "memory" or (one.step, one.round) > (choice.step, choice.round):
                    one.drop()
            if ranks.rank == 0:
                say(_told(choice, ranks.size))
            if self._keeper and self._meshes and ranks.size > 1:
                self._keeper.share_with(self._neighbours(ranks, told))
        finally:
            ranks.leave()
        if loaded is None:
            return None
        for name, part in self._parts.items():
            part.load_state_dict(loaded["parts"][name])
        if self._keeper:
            self._keeper.began(choice.step)
        return Resumed(choice.step, loaded["more"], choice.source)

    def take(self, step: int, **more: Any) -> bool:
        """After `step` steps: takes a snapshot, if one is due. Returns whether it began to.

        The state is copied while the next step computes, and the optimizers wait for that before they change it. If
        anything else changes parameters or an optimizer's state, call `wait` before. `resume` returns `more`, such as the
        epoch. Of a sharded model all ranks take the same steps: this waits until the neighbours have the last one."""
        if self._keeper is None or not self._keeper.due(step):
            return False
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        state = {"step": step, "more": more, "parts": parts}
        place, round_ = _place(), int(os.environ["ELASTIC_ROUND"])
        saves = place[0] == 0 if self._layout is None else self._layout.writes
        return self._keeper.take(step, round_, state, place, saves=saves)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Has an optimizer that is no part by itself, such as one that is made later, wait for what is copied."""
        if self._keeper:
            self._keeper.watch(optimizer)

    def wait(self) -> None:
        """Returns when the state that is being copied may change. Optimizers call it by themselves."""
        if self._keeper:
            self._keeper.wait()

    def settle(self, timeout: float = 60) -> None:
        """Waits until the last snapshot is in memory, and a write to disk that has begun is over."""
        if self._keeper:
            self._keeper.settle(timeout)

    def close(self) -> None:
        """Training is complete: gives the memory back. Not for a worker whose state others resume from."""
        if self._keeper:
            self._keeper.close(forget=True)
            self._keeper = None

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    def _begin(self, ranks: _Ranks, choice: Choice, newer_than: int) -> tuple[dict[str, Any] | None, Choice]:
        """What a job begins with that has committed nothing, as rank 0 finds it, and the choice then."""
        where, refused = None, ""
        if ranks.rank == 0:
            try:
                job, is_first = worker.assignment()["job"], worker.steps_done() == 0
                found = self._begins.look(job, is_first=is_first, layout=self._layout, mesh=self._mesh)
                if found and found.where["step"] >= newer_than:
                    beginning.commit(found, self._timeout)
                    where = found.where
            except beginning.Refused as error:
                refused = str(error)
        where, refused = ranks.gather((where, refused))[0]
        if refused:
            worker.give_up(refused)
        return where, Choice("checkpoint", where["step"], why="the newest on disk") if where else choice

    def _facts(self) -> dict[str, Any]:
        """What tells this training from another that the same job ran before."""
        facts: dict[str, Any] = {"parts": {name: fingerprint(part) for name, part in self._parts.items()}}
        if self._meshes:
            facts["sharded"] = True
        return facts

    def _neighbours(self, ranks: _Ranks, told: list[_Told]) -> Neighbours:
        """Whom this rank shares snapshots with. A line says so if no copies can or need be kept."""
        parts = [rank if one.layout is None else one.layout.part for rank, one in enumerate(told)]
        found = neighbours_of(ranks.rank, [one.node for one in told], parts)
        if isinstance(found, str):
            if ranks.rank == 0:
                say(f"no part is copied to another node: {found}")
            found = None, None
        return Neighbours(ranks.keep(), *found)

    def _loaded(
        self,
        choice: Choice,
        held: list[Snapshot],
        checkpoint: dict[str, Any] | None,
        ranks: _Ranks,
        layouts: list[Layout | None],
    ) -> dict[str, Any] | None:
        """A copy of the chosen state."""
        if choice.source == "checkpoint":
            return checkpoints.read(checkpoint, self._layout, self._mesh)
        if choice.source == "nothing":
            return None
        chosen = [one for one in held if (one.step, one.round) == (choice.step, choice.round)]
        if choice.senders is not None:
            by_part = {one.layout.part: one for one in chosen}
            return sharded_parts.assemble(ranks.group, by_part, choice.senders, layouts, self._mesh)
        if not choice.holders:
            # A neighbour's part may be there, too.
            return next(one for one in chosen if one.rank == ranks.rank).copy(self._mesh)
        holder = choice.holders[0]
        own = chosen[0].copy() if ranks.rank == holder else None
        return own if ranks.size == 1 else broadcast(own, holder, ranks.group)

    def _mesh(self, sharded: dict[str, Any]) -> Any:
        shape, names = sharded["mesh"], sharded.get("names")
        found = [mesh for mesh in self._meshes if list(mesh.mesh.shape) == shape]
        if not found:
            raise ValueError(f"a tensor of the snapshot is sharded over {shape} devices, and none of the model is")
        return next((mesh for mesh in found if list(mesh.mesh_dim_names or ()) == names), found[0])


class Part:
    """A part whose state a function gives, and that only keeps what is loaded. For frameworks that load by themselves."""

    def __init__(self, name: str, state: Callable[[], Any]) -> None:
        """name: what tells it from another training's. state: gives the state."""
        self.name, self.state_dict = name, state
        self.loaded: Any = None

    def load_state_dict(self, state: Any) -> None:
        """Keeps the state as `loaded`."""
        self.loaded = state


class FrameworkCallback:
    """What the callbacks of frameworks share: their trainers load a state from a path."""

    def __init__(
        self,
        *,
        snapshot_every: int = 1,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1000,
        resume: str | os.PathLike[str] = "auto",
    ) -> None:
        """snapshot_every: steps from one snapshot to the next. checkpoint_dir, checkpoint_every, resume: as `Snapshots`
        has them: with a folder, what is in memory is also written there when all nodes leave or the job fails."""
        folder = {"checkpoint_dir": checkpoint_dir, "checkpoint_every": checkpoint_every, "resume": resume}
        self._settings = {"every": snapshot_every, **folder}
        self._snapshots: Snapshots | None = None
        self._trainer: Any = None
        # The folder of the state that the trainer reads.
        self._restored: str | None = None

    def on_train_end(self, *arguments: Any, **named: Any) -> None:
        """Gives the memory back."""
        if self._snapshots:
            self._snapshots.close()

    def _watch(self, optimizer: Any) -> None:
        # A framework may have wrapped it.
        if self._snapshots:
            self._snapshots.watch(getattr(optimizer, "optimizer", optimizer))

    def _remove_restored(self) -> None:
        if self._restored:
            shutil.rmtree(self._restored, ignore_errors=True)
            self._restored = None


def from_rank_0(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if _place()[1] == 1:
        return value
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def folder_for_one_read() -> str:
    """A new folder, in memory if possible, for a state that a framework reads from a path. One that a killed process of
    this worker left is removed."""
    shared = "/dev/shm"
    base = shared if os.access(shared, os.W_OK) else tempfile.gettempdir()
    names = [os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("ELASTIC_NODE"), worker.local_rank()]
    prefix = f"elastic-{hashlib.sha256(repr(names).encode()).hexdigest()[:16]}-"
    for former in pathlib.Path(base).glob(prefix + "*"):
        shutil.rmtree(former, ignore_errors=True)
    return tempfile.mkdtemp(prefix=prefix, dir=base)


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others. word: a value that no other group has drawn."""

    offers: list[Offer]
    layout: Layout | None
    node: int
    word: str


class _Ranks:
    """The ranks of the job that agree on a state, by a group of their own."""

    def __init__(self) -> None:
        self.rank, self.size = _place()
        self.group = None
        if self.size > 1:
            if not dist.is_initialized():
                raise RuntimeError("snapshots.resume is to be called after torch.distributed.init_process_group")
            self.group = dist.new_group(backend="gloo")

    def gather(self, mine: Any) -> list[Any]:
        """What each rank tells."""
        if self.size == 1:
            return [mine]
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, mine, group=self.group)
        return told

    def keep(self) -> Any:
        """Hands over the group to the caller, who uses and ends it."""
        group, self.group = self.group, None
        return group

    def leave(self) -> None:
        """Ends the group."""
        if self.group is not None:
            dist.destroy_process_group(self.keep())


def fingerprint(part: Any) -> str:
    """What tells two parts apart whose states do not fit: of a module the names and shapes, of others the kind."""
    if isinstance(part, Part):
        return part.name
    if not isinstance(part, torch.nn.Module):
        return type(part).__qualname__
    shapes = [(name, list(one.shape), str(one.dtype)) for name, one in part.state_dict().items() if hasattr(one, "shape")]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def _place() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _meshes(modules: list[torch.nn.Module]) -> list[Any]:
    """The device meshes that parameters are sharded over."""
    found: list[Any] = []
    for module in modules:
        for one in module.parameters():
            if is_sharded(one) and one.device_mesh not in found:
                found.append(one.device_mesh)
    return found


def _told(choice: Choice, ranks: int) -> str:
    if choice.source == "memory":
        of = f"the copy of rank {choice.holders[0]}" if choice.holders else "each rank's part"
        if choice.senders is not None:
            of = f"{len(choice.senders)} parts, for {ranks} rank{'s' * (ranks > 1)}"
        return f"resumes after step {choice.step}, from memory: {of}"
    if choice.source == "checkpoint":
        return f"resumes after step {choice.step}, from the committed checkpoint: {choice.why}"
    return f"nothing in memory to resume from: {choice.why}"
