"""Where a training begins whose job has committed no checkpoint: at one on disk, or at step 0.

A store that knows of no commit may be a new one, as with `--standalone` or after the loss of an etcd. Its job must not
write over what the folder holds.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import re
import time
from dataclasses import dataclass
from typing import IO, Any

from .. import worker
from . import checkpoints, dcp, files
from .boxes import Layout
from .keeper import say

# The file that names the job whose checkpoints a folder has. The trainer's folders have it too.
_OWNER = "job"
_UNNAMED_ENV = "ELASTIC_JOB_UNNAMED"
# The file that a run without an id of its own locks, as the trainer does.
_LOCK = ".lock"
# Seconds for which a process that was just killed may still have the lock.
_PATIENCE = 5.0
_NAME = re.compile(r"step-(\d+)-round-(\d+)")


class Refused(ValueError):
    """What was asked for would lose a checkpoint, or cannot be. Says what to do."""


@dataclass(frozen=True)
class Found:
    """A checkpoint on disk: where it is, as a commit has it, and its state."""

    where: dict[str, Any]
    state: Any


@dataclass(frozen=True)
class _Seeker:
    """Reads a checkpoint as this rank needs it."""

    layout: Layout | None
    mesh: Any

    def read(self, path: pathlib.Path) -> Found:
        where = {"path": str(path), "digest": worker.digest_of(path)}
        if path.name == dcp.MANIFEST:
            # All ranks come to one answer, whichever files they need.
            dcp.check(path)
        state = checkpoints.read(where, self.layout, self.mesh)
        return Found({"step": state["step"], **where}, state)

    def newest(self, paths: list[pathlib.Path]) -> Found | None:
        """The first that can be read. None if there are none. Raises Refused if none can be read."""
        fault = ""
        for path in paths:
            try:
                return self.read(path)
            except Exception as error:  # noqa: BLE001: whatever is wrong with it, an older one may be whole.
                why = f"{path} cannot be read: {str(error).partition(chr(10))[0] or repr(error)}"
                say(f"{why}; it is skipped")
                fault = fault or why
        if fault:
            raise Refused(f"{fault}. There is no other: to begin at step 0, move step-* away")
        return None


class Beginning:
    """Where a training begins, and whose its folder is."""

    def __init__(self, folder: pathlib.Path | None, resume: str | os.PathLike[str]) -> None:
        """folder: for checkpoints. resume: "auto": at the newest in the folder; "never": at step 0, in a folder without
        any; else another folder or a checkpoint in it, perhaps with `@STEP`. Raises ValueError."""
        text = os.fspath(resume)
        path, _, step = text.rpartition("@")
        if not step.isdecimal() or not path:
            path, step = text, ""
        if not path or (path in ("auto", "never") and step):
            raise ValueError(f"resume is {text!r}: give 'auto', 'never', or a folder of checkpoints, perhaps with @STEP")
        self._folder, self._resume = folder, text
        self._named = None if text in ("auto", "never") else pathlib.Path(path).absolute()
        self._step = int(step) if step else None
        self._lock: IO[str] | None = None

    def look(
        self, job: str, *, is_first: bool, leads: bool = True, layout: Layout | None = None, mesh: Any = None
    ) -> Found | None:
        """What the training begins with, read; None: it begins at step 0. The folder is this job's after that.

        job: empty without an agent. is_first: no worker of the job has done a step. leads: this is rank 0; others read
        their parts. Raises Refused, and OSError if the folder cannot be listed."""
        if leads and self._folder is not None and (not job or _is_unnamed()):
            self._keep_others_out()
        here, seeker = _in(self._folder), _Seeker(layout, mesh)
        if self._named is not None and is_first:
            found = self._seek(seeker)
            if here and (_key(here[0]) > _key(pathlib.Path(found.where["path"])) or not self._is_here(found)):
                raise self._occupied(here[0])
        elif self._resume == "never" and is_first and here:
            raise self._occupied(here[0])
        else:
            self._check_owner(job, here)
            found = seeker.newest(here)
            if found is None and self._named is not None:
                found = self._seek(seeker)
        if leads:
            self._claim(job)
        return found

    def _seek(self, seeker: _Seeker) -> Found:
        """What `resume` names."""
        one = self._named.is_file() or (self._named / dcp.MANIFEST).is_file()
        manifest = self._named / dcp.MANIFEST
        there = [manifest if manifest.is_file() else self._named] if one else _in(self._named)
        found = seeker.newest([path for path in there if self._step in (None, _step_of(path))])
        if found is None:
            of_step = f" of step {self._step}" if self._step is not None else ""
            raise Refused(f"resume={self._resume!r}: no checkpoint{of_step} is there")
        return found

    def _is_here(self, found: Found) -> bool:
        return self._folder in pathlib.Path(found.where["path"]).parents

    def _occupied(self, newest: pathlib.Path) -> Refused:
        return Refused(
            f"{self._folder} holds step {_step_of(newest)}, which resume={self._resume!r} would leave behind and write "
            "over: give resume='auto' to continue from it, or another checkpoint_dir"
        )

    def _owner(self) -> str:
        try:
            return (self._folder / _OWNER).read_text().strip()
        except OSError:
            return ""

    def _check_owner(self, job: str, here: list[pathlib.Path]) -> None:
        """A job without an id of its own continues what its folder has, and so does a process without an agent."""
        if here and job and not _is_unnamed() and self._owner() not in ("", job):
            raise Refused(
                f"{self._folder} belongs to job {self._owner()}, and holds step {_step_of(here[0])}: to continue from "
                f"it, give resume={str(self._folder)!r}; else give job {job} another checkpoint_dir"
            )

    def _keep_others_out(self) -> None:
        """Two runs at once would write over each other's checkpoints, and no store tells them apart."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self._folder / _LOCK).open("a")
        except OSError as error:
            say(f"{self._folder} cannot be locked ({error}): start no second run in it")
            return
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    why = f"another run saves in {self._folder}: wait for its end, or give another checkpoint_dir"
                    raise Refused(why) from None
                time.sleep(0.05)
            except OSError:
                # Of a file system without locks.
                return

    def _claim(self, job: str) -> None:
        if self._folder is None or not job or (_is_unnamed() and self._owner()) or self._owner() == job:
            return
        try:
            files.write(self._folder / _OWNER, lambda file: file.write(f"{job}\n".encode()))
        except OSError as error:
            say(f"{self._folder} does not tell that it is of job {job}: {error}")


def commit(found: Found, timeout: float) -> None:
    """Has the job know a checkpoint that it begins with: later starts resume from it."""
    try:
        worker.commit_checkpoint(
            found.where["step"], found.where["path"], digest=found.where["digest"], timeout=timeout
        )
    except worker.AgentError as error:
        say(f"the checkpoint of step {found.where['step']} is not committed: {error}")


def _is_unnamed() -> bool:
    return os.environ.get(_UNNAMED_ENV) == "1"


def _in(folder: pathlib.Path | None) -> list[pathlib.Path]:
    """Every whole checkpoint of a folder, the newest first."""
    if folder is None or not folder.is_dir():
        return []
    whole = [*folder.glob("step-*-round-*.pt"), *folder.glob(f"step-*-round-*/{dcp.MANIFEST}")]
    return sorted((path for path in whole if _NAME.match(_name(path))), key=_key, reverse=True)


def _name(path: pathlib.Path) -> str:
    return path.parent.name if path.name == dcp.MANIFEST else path.name


def _key(path: pathlib.Path) -> tuple[int, int, str]:
    """In this order the newest is the last."""
    found = _NAME.match(_name(path))
    step, round_ = map(int, found.groups()) if found else (0, 0)
    return step, round_, _name(path)


def _step_of(path: pathlib.Path) -> int:
    return _key(path)[0]
