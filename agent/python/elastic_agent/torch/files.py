"""Files that are whole under their names, or not there, and the digests that tell them from others."""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Callable
from typing import IO, Any

from ..worker import digest_of


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
