"""Checkpoints on disk: a whole state in one file, as torch.save writes it, or a sharded one in a folder, where every rank
writes its part."""

from __future__ import annotations

import os
import pathlib
import shutil
from dataclasses import dataclass
from typing import Any

import torch

from .. import worker
from . import dcp, files, tree
from .boxes import Layout


@dataclass
class Folder:
    """The folder for states on disk, and how often they are written."""

    path: pathlib.Path
    # A checkpoint is written after this many steps. The newest `keep` are kept.
    every: int
    keep: int
    # Seconds that a commit may take, and that the ranks of a sharded state wait for each other.
    timeout: float
    # A value that only the ranks that write a sharded state together share.
    writers: str = ""


def place_of(folder: str | os.PathLike[str], name: str) -> pathlib.Path:
    """Where the session of this name has its checkpoints: a folder in `folder`, which it makes. Raises ValueError for a
    name that no folder has."""
    if os.path.basename(name) != name:
        raise ValueError(f"a folder cannot have the session's name {name!r}: give it one without slashes")
    path = pathlib.Path(folder, name).absolute()
    if name:
        path.mkdir(exist_ok=True)
    return path


def save(folder: Folder, state: Any, step: int, round_: int, note: str = "") -> None:
    """Writes a whole state and has the agent commit it. `note`: where others than rank 0 write."""
    # Its round is in its name: what a rank of an earlier round still writes has another.
    path = folder.path / f"{name_of(step, round_, note)}.pt"
    with files.waited_for("writing", path):
        digest = write(path, state)
    _commit(folder, step, path, digest)
    older = [one for one in sorted(folder.path.glob("step-*-round-*.pt")) if one.name < path.name]
    for old in older[: len(older) - folder.keep + 1]:
        old.unlink()


def save_part(
    folder: Folder, layout: Layout, described: tuple[Any, list[torch.Tensor]], step: int, round_: int, *, leads: bool
) -> None:
    """Writes this rank's part of a sharded state, as `tree.take_apart` gives it. The rank that `leads` waits for all
    parts, and commits them as one. Raises OSError if they do not come."""
    path = folder.path / name_of(step, round_, f"-{folder.writers}")
    if leads:
        _remove_unfinished(folder, path)
    with files.waited_for("writing", path):
        took = dcp.write_part(path, layout, *described)
    if not leads:
        return
    _commit(folder, step, *dcp.join(path, layout.parts, folder.timeout + took))
    whole = _remove_unfinished(folder, path)
    for old in whole[: len(whole) - folder.keep + 1]:
        shutil.rmtree(old, ignore_errors=True)


def _remove_unfinished(folder: Folder, path: pathlib.Path) -> list[pathlib.Path]:
    """Removes what was begun before the step of the sharded state `path`, and is not whole. Returns what is whole and
    older, the oldest first."""
    whole = []
    for older in sorted(one for one in folder.path.glob("step-*-round-*/") if one.name < path.name):
        if (older / dcp.MANIFEST).exists():
            whole.append(older)
        elif _step_in(older) < _step_in(path):
            # Another replica, which leaves too, may be at work on the same step.
            shutil.rmtree(older, ignore_errors=True)
    return whole


def _step_in(path: pathlib.Path) -> str:
    """The part of a checkpoint's name that orders it by its step."""
    return path.name.partition("-round-")[0]


def _commit(folder: Folder, step: int, path: pathlib.Path, digest: str) -> None:
    if worker.available():
        worker.commit_checkpoint(step, path, digest=digest, timeout=folder.timeout)


def name_of(step: int, round_: int, note: str = "") -> str:
    """The name of a checkpoint. By name they are in the order of their steps."""
    return f"step-{step:010}-round-{round_}{note}"


def write(path: pathlib.Path, state: Any) -> str:
    """Writes a whole state to a file, durably. Returns the file's digest. What writers of older steps have left
    unfinished goes first: a rank that was killed cannot remove it."""
    state = tree.plain(state)
    for left in path.parent.glob(f"step-*-round-*.pt{files.PART}"):
        if _step_in(left) < _step_in(path):
            left.unlink(missing_ok=True)
    return files.write(path, lambda file: torch.save(state, file))


def read(checkpoint: dict[str, Any], layout: Layout | None = None, mesh: Any = None) -> Any:
    """The state of a checkpoint whose bytes are those that were committed. layout: the part that this rank has, if its
    model is sharded. mesh: gives the device mesh of what is described as sharded."""
    path = pathlib.Path(checkpoint["path"])
    with files.waited_for("reading", path):
        return _read(path, checkpoint["digest"], layout, mesh)


def _read(path: pathlib.Path, digest: str, layout: Layout | None, mesh: Any) -> Any:
    files.check(path, digest)
    if path.name == dcp.MANIFEST:
        return dcp.read(path, layout, mesh)
    if layout is not None:
        raise ValueError(
            f"{path} is of a whole model, and this one is sharded: begin another job, whose script loads it before "
            "fully_shard"
        )
    return torch.load(path, map_location="cpu", weights_only=True)
