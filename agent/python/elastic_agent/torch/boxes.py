"""Which part of a sharded tensor a rank holds, and what it needs of others' parts when the number of ranks has changed.
Nothing here calls torch.distributed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


# As PyTorch prints placements.
_SHARD = re.compile(r"_?S\((\d+)(?:, (\d+))?\)")


class Box(NamedTuple):
    """A rectangular piece of a tensor: where it begins, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How a model is divided among ranks, and which of them this is."""

    # The shape of the device mesh, and this rank's place in it.
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    # The dimensions of the mesh that parameters are sharded over. Along the others lie copies.
    over: tuple[int, ...]
    # The names of the mesh's dimensions, of a mesh on some of whose dimensions alone a tensor may lie.
    names: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        """The number of parts that the model is divided into."""
        return math.prod(self.mesh[one] for one in self.over)

    @property
    def part(self) -> int:
        """Which of them this rank holds. Under HSDP several ranks hold the same."""
        number = 0
        for one in self.over:
            number = number * self.mesh[one] + self.coordinate[one]
        return number

    @property
    def stages(self) -> int:
        """Into how many stages a pipeline divides the model."""
        return dict(zip(self.names, self.mesh)).get("pipeline", 1)

    @property
    def stage(self) -> str:
        """Where the names of this rank's tensors begin in a checkpoint of a pipeline: its stages may have the same."""
        return f"stage-{dict(zip(self.names, self.coordinate))['pipeline']}." if self.stages > 1 else ""

    @property
    def writes(self) -> bool:
        """Whether this rank writes its part. The ranks that hold the same part take turns with the parts."""
        copies, copy = 1, 0
        for one, (size, place) in enumerate(zip(self.mesh, self.coordinate)):
            if one not in self.over:
                copies, copy = copies * size, copy * size + place
        return copy == self.part % copies

    def place(self, sharded: dict[str, Any]) -> tuple[list[str], tuple[int, ...], tuple[int, ...]]:
        """How a tensor that was described in another layout lies in this one: its placements, the size of each dimension
        of the mesh that it lies on, and this rank's place there. Raises ValueError if that is not clear."""
        if not self.names:
            same = list(self.mesh) == sharded.get("mesh")
            placements = sharded["placements"] if same else self.placements(sharded["placements"])
            return placements, self.mesh, self.coordinate
        # A mesh of one dimension may have had no name.
        along = [self.names.index(name) for name in sharded.get("names") or self.names]
        sizes = [self.mesh[one] for one in along]
        return _cut_last(sharded["placements"], sizes), tuple(sizes), tuple(self.coordinate[one] for one in along)

    def is_first_with(self, described: dict[str, Any]) -> bool:
        """Whether no rank of a lower part holds the same piece of a described tensor."""
        if not self.names:
            return self.part == 0 or list(described["shape"]) != list(whole_shape(described))
        sharded = described.get("sharded", {"names": (), "placements": ()})
        pairs = zip(sharded.get("names") or self.names, sharded["placements"])
        cut = {"pipeline", *(name for name, placement in pairs if sharded_dimension(placement) is not None)}
        return all(place == 0 for name, place in zip(self.names, self.coordinate) if name not in cut)

    def placements(self, former: Sequence[str]) -> list[str]:
        """How a tensor that was placed so on another mesh lies on this one. Raises ValueError if that is not clear."""
        dimensions = [sharded_dimension(one) for one in former]
        along = {one for one in dimensions if one is not None}
        if not along:
            return ["R"] * len(self.mesh)
        if len(along) > 1 or len([one for one in dimensions if one is not None]) > 1 or len(self.over) != 1:
            raise ValueError(
                f"a tensor is placed as {' '.join(former)}, and only what is sharded over one dimension of the device "
                "mesh can be divided again"
            )
        (dimension,) = along
        return [f"S({dimension})" if one in self.over else "R" for one in range(len(self.mesh))]


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor lies on a device mesh."""
    return type(tensor).__name__ == "DTensor"


def part_of(tensor: Any) -> Any:
    """What this rank has of a tensor."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor


def sharded_dimension(placement: str) -> int | None:
    """The sharded dimension of a placement as PyTorch prints it; None if it is replicated. Raises ValueError for
    others."""
    if placement == "R":
        return None
    if found := _SHARD.fullmatch(placement):
        return int(found[1])
    raise ValueError(f"it is placed as {placement}, and a snapshot holds what is replicated or sharded")


def pieces_before(placement: str) -> int | None:
    """Of a placement that cuts what the other dimensions of the mesh have cut: into how many pieces. FSDP2 places so
    what is divided by tensor parallelism along the same dimension."""
    found = _SHARD.fullmatch(placement)
    return int(found[2]) if found and found[2] else None


def _cut_last(placements: Sequence[str], mesh: Sequence[int]) -> list[str]:
    """The placements of a tensor on a mesh of this size, if they were those on a mesh of another."""
    found = []
    for one in placements:
        if pieces_before(one) is not None:
            dimension = sharded_dimension(one)
            others = (size for other, size in zip(placements, mesh) if other == f"S({dimension})")
            one = f"_S({dimension}, {math.prod(others)})"
        found.append(one)
    return found


def box_of(shape: Sequence[int], placements: Sequence[str], mesh: Sequence[int], coordinate: Sequence[int]) -> Box:
    """The piece that the rank at `coordinate` holds. It is cut as by torch.chunk: the last pieces are smaller, or
    empty."""
    offset, size = [0] * len(shape), list(shape)
    in_order = sorted(zip(placements, mesh, coordinate), key=lambda one: pieces_before(one[0]) is not None)
    for placement, ranks, place in in_order:
        dimension = sharded_dimension(placement)
        if dimension is None:
            continue
        whole = size[dimension]
        piece = -(-whole // ranks)
        begin = min(piece * place, whole)
        offset[dimension] += begin
        size[dimension] = min(piece, whole - begin)
    return Box(tuple(offset), tuple(size))


def overlap(left: Box, right: Box) -> Box | None:
    """What two pieces of one tensor have in common. None if that is nothing."""
    begin = tuple(map(max, left.offset, right.offset))
    end = [min(a + b, c + d) for a, b, c, d in zip(left.offset, left.shape, right.offset, right.shape)]
    shape = tuple(b - a for a, b in zip(begin, end))
    return Box(begin, shape) if all(one > 0 for one in shape) else None


def describe(tensor: Any) -> dict[str, Any]:
    """The whole of a tensor on a device mesh, and where this rank's part begins. Raises ValueError if that part is not
    what its placements say."""
    placements = [str(one) for one in tensor.placements]
    mesh, coordinate = list(tensor.device_mesh.mesh.shape), tensor.device_mesh.get_coordinate()
    box = box_of(tensor.shape, placements, mesh, coordinate)
    local, names = tuple(tensor.to_local().shape), tensor.device_mesh.mesh_dim_names
    if local != box.shape or _cut_last(placements, mesh) != placements:
        raise ValueError(f"its part has the shape {list(local)}, and by its placements it would be {list(box.shape)}")
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "placements": placements,
        "mesh": mesh,
        "offset": list(box.offset),
        **({"names": list(names)} if names else {}),
    }


def box_in(described: dict[str, Any]) -> Box:
    """The piece that a described tensor is. One that is not sharded is all of it."""
    shape = tuple(described["shape"])
    sharded = described.get("sharded")
    return Box(tuple(sharded["offset"]) if sharded else (0,) * len(shape), shape)


def whole_shape(described: dict[str, Any]) -> list[int]:
    """The shape of the whole of a described tensor."""
    return (described.get("sharded") or described)["shape"]


def largest(described: dict[str, Any]) -> tuple[int, ...]:
    """The shape of the largest piece that any rank has of a described tensor: the first rank's."""
    sharded = described.get("sharded")
    if sharded is None:
        return tuple(described["shape"])
    return box_of(sharded["shape"], sharded["placements"], sharded["mesh"], [0] * len(sharded["mesh"])).shape


def box_for(described: dict[str, Any], layout: Layout) -> Box:
    """The piece of a described tensor that a rank of this layout holds."""
    sharded = described.get("sharded")
    if sharded is None:
        return box_in(described)
    return box_of(sharded["shape"], *layout.place(sharded))


def redescribe(described: dict[str, Any], layout: Layout) -> None:
    """Makes the description of a tensor's piece that of the piece in another layout."""
    box, sharded = box_for(described, layout), described.get("sharded")
    described["shape"] = list(box.shape)
    if sharded is not None:
        placements, mesh, _ = layout.place(sharded)
        sharded.update(placements=placements, mesh=list(mesh), offset=list(box.offset))


def layout_of(parameters: Iterable[tuple[str, Any]]) -> Layout | None:
    """The layout of a model's named parameters; None if there is not exactly one. Raises ValueError for one that no
    snapshot could hold."""
    found = set()
    for name, one in parameters:
        if not is_sharded(one):
            continue
        try:
            dimensions = [sharded_dimension(str(placement)) for placement in one.placements]
        except ValueError as error:
            raise ValueError(f"the parameter {name!r} cannot be in a snapshot: {error}") from None
        mesh = one.device_mesh
        over = tuple(number for number, dimension in enumerate(dimensions) if dimension is not None)
        found.add(Layout(tuple(mesh.mesh.shape), tuple(mesh.get_coordinate()), over))
    return found.pop() if len(found) == 1 else None
