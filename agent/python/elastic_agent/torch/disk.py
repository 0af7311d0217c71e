"""Where the state of a session outlives its process: snapshots in the agent's memory, and checkpoints on disk. Which
state the ranks continue from, membership.py decides."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from .. import worker
from . import beginning, checkpoints, tree
from .checkpoints import Folder
from .frozen import Frozen
from .group import Group
from .keeper import Keeper, say
from .replica import Replica
from .slots import Snapshot
from .state import Progress


class Disk:
    """The snapshots and checkpoints of a session on one rank."""

    def __init__(
        self,
        training: Progress,
        replica: Replica,
        folder: Folder | None,
        snapshot_every: int | None,
        timeout: float,
        begins: beginning.Beginning,
    ) -> None:
        """folder: for checkpoints. snapshot_every: steps from one snapshot to the next. None: there are none.
        timeout: seconds to wait for what is being copied or written. begins: where the training does."""
        self._training, self._replica, self._folder, self._begins = training, replica, folder, begins
        self.snapshot_every, self._timeout = snapshot_every, timeout
        self._keeper: Keeper | None = None
        self._left: Snapshot | None = None
        # The step of the newest checkpoint that was written, or tried.
        self._saved = -1

    def take_up(self) -> int | None:
        """Finds what an earlier worker left in the agent's memory, for `load_left`. Returns the step, None if there is
        nothing. It counts as this rank's own."""
        mesh = self._replica.mesh
        if self.snapshot_every is None or (worker.local_rank() != 0 and mesh is None):
            return None
        facts = self._training.facts()
        if mesh is not None:
            facts["part"] = [self._replica.part, self._replica.size]
        self._keeper = Keeper(
            facts,
            optimizers=self._training.optimizers,
            folder=self._folder,
            every=self.snapshot_every,
            sharded=mesh is not None,
            layout=self._replica.layout,
            frozen=Frozen(self._training.parameters()),
        )
        held = {(one.step, one.round): one for one in self._keeper.held()}
        newest = self._replica.common(held)
        if newest is None:
            return None
        self._left = held[newest]
        return newest[0]

    def load_left(self) -> None:
        """Continues from what `take_up` has found."""
        self.load(self._left.copy(self._replica.mesh_of))

    def why_lost(self) -> str:
        """Why no worker finds a state that was trained."""
        if self._folder is not None:
            return f"no checkpoint was committed in {self._folder.path}, and no agent holds a snapshot"
        if self.snapshot_every is not None:
            return "the agents whose memory held its snapshots are gone, and the session has no `checkpoint_dir`"
        return "the session has no `checkpoint_dir` and no `snapshot_every`, which keep it"

    def own(self, checkpoint: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
        """The committed checkpoint, if it can be that of the session of this name: this has a folder of its own."""
        if not name or checkpoint is None:
            return checkpoint
        parents = pathlib.Path(checkpoint["path"]).parents
        return checkpoint if self._folder and self._folder.path in parents else None

    def begin(self, group: Group, place: dict[str, Any], together: Callable[[Any], Any], *, is_first: bool) -> int:
        """Where no rank has a state and the job has committed none: has rank 0 load what the training begins with, which
        the job knows then. Returns its step, 0 if there is none. together: how ranks read. is_first: no step was done."""

        def look() -> beginning.Found | None:
            leads, layout, mesh = place["rank"] == 0, self._replica.layout, self._replica.mesh_of
            job = place.get("job", "")
            found = self._begins.look(job, is_first=is_first, leads=leads, layout=layout, mesh=mesh)
            if found and leads and worker.available():
                beginning.commit(found, self._timeout)
            return found

        try:
            found = together(look if group.rank == 0 else None)
        except beginning.Refused as error:
            worker.give_up(str(error))
        if found:
            self.load(found.state)
        if found and place["rank"] == 0:
            say(f"training begins after step {found.where['step']}, at {found.where['path']}")
        step = max(group.gather(found.where["step"] if found else 0))
        if step:
            self.is_saved(step)
        return step

    def load(self, value: dict[str, Any]) -> None:
        """Has the training continue from a state."""
        self.may_change()
        self._training.load(value)
        if self._keeper:
            self._keeper.began(self._training.step_number)

    def may_change(self) -> None:
        """Returns when no copy that is under way needs the state unchanged."""
        if self._keeper:
            self._keeper.wait()

    def copied(self) -> None:
        """On a sharded model, waits for the snapshot that is being copied: then all ranks of the replica have it when
        the next begins."""
        if self._keeper and self._replica.mesh is not None:
            self._keeper.copied(self._timeout)

    def take_snapshot(self, place: dict[str, Any]) -> None:
        """After a step: takes a snapshot if one is due."""
        if self._keeper and self._training.is_common and self._keeper.due(self._training.step_number):
            value, ranks = self._training.value(), (place["rank"], place["world_size"])
            saves = self._replica.is_first(place["rank"])
            self._keeper.take(value["step"], place["round"], value, ranks, saves=saves)

    def due(self) -> bool:
        """After a step: whether a checkpoint is due, and snapshots are not written instead. It is the same on all
        ranks."""
        if self._folder is None or self._keeper or not self._training.is_common:
            return False
        return self._training.step_number % self._folder.every < self._training.stride

    def is_saved(self, step: int) -> None:
        """A checkpoint of this step is committed."""
        self._saved = step

    def save(self, place: dict[str, Any]) -> Callable[[], None] | None:
        """What this rank has to do so that rank 0's state is on disk; of a sharded model its whole replica's. None if it
        has nothing to do."""
        saved, self._saved = self._saved, self._training.step_number
        done = self._saved in (0, saved) or self._folder is None
        if done or not self._replica.is_first(place["rank"]):
            return None
        return lambda: self._save(place, leads=place["rank"] == 0)

    def save_alone(self, place: dict[str, Any]) -> None:
        """Writes this rank's state if no checkpoint has its last step: perhaps no other worker has the state. Others
        that leave write theirs."""
        if self._saved < self._training.step_number:
            self._save(place, f"-rank-{place['rank']}", leads=self._replica.part == 0)

    def close(self, *, forget: bool) -> None:
        """Ends the copying. forget: no worker will resume from what is in memory."""
        if self._keeper:
            self._keeper.close(forget=forget)

    def _save(self, place: dict[str, Any], note: str = "", *, leads: bool) -> None:
        """Writes and commits a checkpoint. Training continues if the disk is full."""
        if self._folder is None:
            return
        if self._keeper:
            # An older snapshot that is being written must not be committed after this.
            self._keeper.settle(self._timeout)
            if self._keeper.committed == self._training.step_number:
                return
        step, round_, layout = self._training.step_number, place["round"], self._replica.layout
        try:
            if layout is None:
                checkpoints.save(self._folder, self._training.value(), step, round_, note)
            else:
                described = tree.take_apart(self._training.value())
                checkpoints.save_part(self._folder, layout, described, step, round_, leads=leads)
        except (OSError, ValueError, worker.AgentError) as error:
            say(f"the checkpoint of step {step} is not saved: {error}")
