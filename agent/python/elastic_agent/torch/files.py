"""Files that are whole under their names, or not there, and the digests that tell them from others."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from ..worker import digest_of

# Seconds until a line tells of a disk that is waited for. Until each further line it is twice as long.
_PATIENCE = 30.0

# How the name of a file ends that is being written.
PART = ".part"


class Hashed:
    """A file that is written, and the digest of what was."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._sha = file, hashlib.sha256()
        # What torch.save makes a RuntimeError of, which says nothing of a full disk.
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes all of it."""
        self._sha.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.failed = error
            raise

    def tell(self) -> int:
        """The place after what was written."""
        return self._file.tell()

    def flush(self) -> None:
        """For who is given this as a file."""
        self._file.flush()

    def digest(self) -> str:
        """As a commit has it."""
        return f"sha256:{self._sha.hexdigest()}"


def write(path: pathlib.Path, filled: Callable[[Hashed], Any]) -> str:
    """Writes a file durably, with what `filled` writes to it. Returns its digest. Raises OSError, and then leaves
    nothing that would keep a full disk full."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + PART)
    try:
        with part.open("wb") as file:
            hashed = Hashed(file)
            try:
                filled(hashed)
            except RuntimeError:
                if hashed.failed is None:
                    raise
                raise hashed.failed from None
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return hashed.digest()


@contextlib.contextmanager
def waited_for(what: str, path: pathlib.Path) -> Iterator[None]:
    """Around what waits for a disk, however long: now and then a line says so. what: what is done at the path."""
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        pause = _PATIENCE
        while not over.wait(pause):
            say(f"{what} {path} has taken {time.monotonic() - began:.0f} s: its disk is slow, or does not answer")
            pause *= 2

    threading.Thread(target=tell, name="elastic-disk", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def say(line: str) -> None:
    """Prints a line for people."""
    print(f"elastic_agent.torch: {line}", file=sys.stderr, flush=True)


def sync_folder(path: pathlib.Path) -> None:
    """Makes durable which files are in a folder."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def check(path: pathlib.Path, committed: str) -> None:
    """Raises ValueError if a file's bytes are not those that were committed."""
    digest = digest_of(path)
    if digest != committed:
        raise ValueError(
            f"{path} is not the checkpoint that was committed (it has {digest}, committed was {committed}): "
            "restore the file, or begin another job"
        )
