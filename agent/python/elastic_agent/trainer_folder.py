"""Which of the checkpoints of a Transformers Trainer are whole. Needs only the standard library."""

from __future__ import annotations

import json
import os
import pathlib
import re
import struct
import zipfile
from collections.abc import Callable

_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)([.-].*)?\.(safetensors|bin)")


def newest_whole(folder: str | os.PathLike[str], say: Callable[[str], None]) -> str | None:
    """The newest whole `checkpoint-N` in a folder. A Trainer that is killed while it saves leaves a torn one, and so
    does a host that loses power: files are empty or cut short then. `get_last_checkpoint` takes such a one, and every
    restart fails. `say` gets a line for each newer one that is skipped."""
    found = []
    for one in pathlib.Path(folder).glob("checkpoint-*"):
        step = one.name.removeprefix("checkpoint-")
        if step.isdecimal():
            found.append((int(step), one))
    for _, one in sorted(found, reverse=True):
        fault = fault_of(one)
        if fault is None:
            return str(one)
        say(f"{one} is skipped: {fault}")
    return None


def step_of(checkpoint: str | os.PathLike[str]) -> int:
    """The steps that were done. Raises OSError, ValueError, KeyError or TypeError if it does not say."""
    return int(json.loads((pathlib.Path(checkpoint) / "trainer_state.json").read_text())["global_step"])


def fault_of(checkpoint: pathlib.Path) -> str | None:
    """Why nothing can resume from a checkpoint; None if its files are there as far as their own ends tell. Their numbers
    are not read."""
    try:
        step_of(checkpoint)
    except FileNotFoundError:
        return "it has no trainer_state.json, which is written last"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its trainer_state.json cannot be read: {error}"
    try:
        files = [one for one in checkpoint.rglob("*") if one.is_file()]
        # Frameworks that divide a model write folders of their own.
        if not any(_WEIGHTS.fullmatch(one.name) or one.parent != checkpoint for one in files):
            return "it has no weights"
        for one in sorted(files):
            if fault := _fault_of_file(one):
                return f"{one.relative_to(checkpoint)} {fault}"
    except OSError as error:
        return f"it cannot be read: {error}"
    return None


def _fault_of_file(path: pathlib.Path) -> str | None:
    if path.suffix == ".safetensors":
        return _fault_of_safetensors(path)
    if path.suffix in (".pt", ".pth", ".bin", ".distcp") and path.stat().st_size == 0:
        return "is empty"
    if path.suffix in (".pt", ".pth", ".bin"):
        return _fault_of_torch_save(path)
    if path.name.endswith(".index.json"):
        try:
            names = set(json.loads(path.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            return f"cannot be read: {error}"
        missing = sorted(one for one in names if not (path.parent / one).exists())
        return f"names {missing[0]}, which is not there" if missing else None
    return None


def _fault_of_safetensors(path: pathlib.Path) -> str | None:
    """The file is the length of a header, the header in JSON, and the numbers."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(8)
        header = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        if not 0 < header <= size - 8:
            return "is cut short" if size else "is empty"
        try:
            tensors = json.loads(file.read(header))
            ends = [one["data_offsets"][1] for name, one in tensors.items() if name != "__metadata__"]
        except (ValueError, KeyError, AttributeError, TypeError, IndexError):
            return "has a damaged header"
    return "is cut short" if size < 8 + header + max(ends, default=0) else None


def _fault_of_torch_save(path: pathlib.Path) -> str | None:
    """The file is a zip, whose list of contents comes last. Before PyTorch 1.6 it was a pickle, and numbers after it."""
    with path.open("rb") as file:
        if file.read(1) == b"\x80":
            return None
    try:
        zipfile.ZipFile(path).close()
    except zipfile.BadZipFile:
        return "is cut short"
    return None
