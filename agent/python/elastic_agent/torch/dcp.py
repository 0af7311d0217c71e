"""A sharded state in a folder, in the layout of torch.distributed.checkpoint (DCP): `dcp.load` reads it, too. Each rank
writes its part, and one rank joins the parts when all are there. This needs no process group, and training continues.

    part-0.distcp, part-1.distcp, …    the numbers
    part-0.json, part-1.json, …        what is in them, and where; and the rest of the state
    .metadata                          the same for DCP
    elastic.json                       the rest of the state, and the digests of all: what is committed
"""

from __future__ import annotations

import json
import math
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..worker import digest_of
from . import boxes, files, tree
from .boxes import Box, Layout

MANIFEST = "elastic.json"
# Seconds between two looks for the parts of others.
_LOOK = 0.05


def write_part(folder: pathlib.Path, layout: Layout, description: Any, tensors: list[torch.Tensor]) -> float:
    """Writes the numbers that this rank holds and no rank of a lower part does. Returns the seconds that it took."""
    began, pieces = time.monotonic(), []

    def fill(file: files.Hashed) -> None:
        for name, one, tensor in zip(tree.names_of(description), tree.tensors_of(description), tensors):
            if tensor.numel() == 0 or not layout.is_first_with(one):
                continue
            box, begin = boxes.box_in(one), file.tell()
            # Of its own: else all of the memory that it lies in is written.
            torch.save(tensor.detach().cpu().clone(), file)
            pieces.append([layout.stage + name, *box, boxes.whole_shape(one), one["dtype"], begin, file.tell() - begin])

    name = f"part-{layout.part}.distcp"
    digest = files.write(folder / name, fill)
    tells = layout.part == 0 or layout.stages > 1
    about = {"file": name, "digest": digest, "pieces": pieces, "state": description if tells else None}
    about |= {"names": layout.names, "stage": layout.stage}
    files.write(_part(folder, layout.part), lambda file: file.write(json.dumps(about).encode()))
    return time.monotonic() - began


def join(folder: pathlib.Path, parts: int, patience: float) -> tuple[pathlib.Path, str]:
    """Makes one checkpoint of all parts, when they are there. Returns the path and the digest to commit. Raises
    TimeoutError if no part comes for `patience` seconds, and ValueError if they are not one state."""
    from torch.distributed.checkpoint import FileSystemWriter

    abouts = [json.loads(path.read_bytes()) for path in _wait_for_parts(folder, parts, patience)]
    _check(abouts)
    FileSystemWriter(folder).finish(*_metadata(abouts))
    digests = {one["file"]: one["digest"] for one in abouts}
    digests[".metadata"] = digest_of(folder / ".metadata")
    manifest = {"state": abouts[0]["state"], "files": digests, "names": abouts[0]["names"]}
    if abouts[0]["stage"]:
        manifest["stages"] = {one["stage"]: one["state"] for one in abouts if one["state"]}
    digest = files.write(folder / MANIFEST, lambda file: file.write(json.dumps(manifest).encode()))
    return folder / MANIFEST, digest


def _part(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / f"part-{number}.json"


def _wait_for_parts(folder: pathlib.Path, parts: int, patience: float) -> list[pathlib.Path]:
    wanted = [_part(folder, number) for number in range(parts)]
    there, until = 0, time.monotonic() + patience
    while True:
        # The whole list: a network disk may answer for a while that a file is not there that was asked for before.
        found = set(folder.iterdir())
        missing = [path.stem for path in wanted if path not in found]
        if not missing:
            return wanted
        if parts - len(missing) > there:
            there, until = parts - len(missing), time.monotonic() + patience
        if time.monotonic() > until:
            raise TimeoutError(
                f"{', '.join(missing)} of {parts} did not come within {patience:.0f} s: do all nodes see {folder}?"
            )
        time.sleep(_LOOK)


def _check(abouts: list[dict[str, Any]]) -> None:
    found: dict[str, int] = {}
    for name, _, shape, *_ in (piece for about in abouts for piece in about["pieces"]):
        found[name] = found.get(name, 0) + math.prod(shape)
    for about in (one for one in abouts if one["state"]):
        for name, one in zip(_names(about["stage"], about["state"]), tree.tensors_of(about["state"])):
            if found.get(name, 0) != math.prod(boxes.whole_shape(one)):
                raise ValueError(
                    f"of {name} the parts hold {found.get(name, 0)} of {math.prod(boxes.whole_shape(one))} numbers"
                )


def _names(stage: str, state: Any) -> list[str]:
    return [stage + name for name in tree.names_of(state)]


def _metadata(abouts: list[dict[str, Any]]) -> tuple[Any, list[Any]]:
    """What DCP wants to know of all parts: what each tensor is, and where its pieces are."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.storage import WriteResult

    tensors: dict[str, Any] = {}
    results = []
    for about in abouts:
        for name, offset, shape, whole, dtype, begin, length in about["pieces"]:
            properties = metadata.TensorProperties(dtype=tree.dtype_of({"dtype": dtype}))
            tensor = tensors.setdefault(name, metadata.TensorStorageMetadata(properties, torch.Size(whole), []))
            tensor.chunks.append(metadata.ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
            index = metadata.MetadataIndex(name, torch.Size(offset), len(tensor.chunks) - 1)
            results.append(WriteResult(index, length, _StorageInfo(about["file"], begin, length)))
    return metadata.Metadata(tensors), [results]


def check(manifest: pathlib.Path) -> None:
    """Raises ValueError if any file is not what was written."""
    for name, digest in json.loads(manifest.read_bytes())["files"].items():
        files.check(manifest.parent / name, digest)


def read(manifest: pathlib.Path, layout: Layout | None, mesh: Callable[[dict[str, Any]], Any] | None) -> Any:
    """The state of a checkpoint: of sharded tensors the part that this layout has, or all of them where there is none.
    Raises ValueError if what it needs is not what was committed, or is divided along other dimensions of a mesh."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader

    folder, about = manifest.parent, json.loads(manifest.read_bytes())
    states, digests = about.get("stages", {"": about["state"]}), about["files"]
    along = about.get("names") or ["shard"]
    if layout is not None and layout.names and list(layout.names) != along:
        raise ValueError(
            f"{manifest} is of a device mesh with the dimensions {', '.join(along)}, and this job's has "
            f"{', '.join(layout.names)}: begin another job, whose script loads it by torch.distributed.checkpoint"
        )
    if (wanted := layout.stages if layout else 1) != len(states):
        raise ValueError(
            f"{manifest} is of a pipeline of {len(states)} stages, and this job's model has {wanted}: begin another job, "
            "whose script loads it by torch.distributed.checkpoint"
        )
    stage = layout.stage if layout else ""
    state = states[stage]
    described = tree.tensors_of(state)
    for one in described:
        if layout is not None:
            boxes.redescribe(one, layout)
        else:
            one["shape"] = list(boxes.whole_shape(one))
            one.pop("sharded", None)
    # Before it is read: it is a pickle.
    files.check(folder / ".metadata", digests[".metadata"])
    metadata = FileSystemReader(folder).read_metadata()
    names = _names(stage, state)
    for name in sorted(set(_files_of(metadata, zip(names, map(boxes.box_in, described))))):
        files.check(folder / name, digests[name])
    tensors = [tree.placed(one, room, mesh) for one, room in zip(described, tree.room_for(state))]
    # What has no numbers is in no file.
    kept = {name: one for name, one in zip(names, tensors) if one.numel()}
    with warnings.catch_warnings():
        # That it is loaded by one process: so it is meant.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(kept, storage_reader=FileSystemReader(folder), no_dist=True)
    return tree.put_together(state, tensors)


def _files_of(metadata: Any, wanted: Iterator[tuple[str, Box]]) -> Iterator[str]:
    """The files that hold something of these tensors."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    for name, box in wanted:
        for chunk in metadata.state_dict_metadata[name].chunks if name in metadata.state_dict_metadata else []:
            if boxes.overlap(Box(tuple(chunk.offsets), tuple(chunk.sizes)), box):
                yield metadata.storage_data[MetadataIndex(name, chunk.offsets)].relative_path
