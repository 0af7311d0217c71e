"""A state as a description in JSON and a list of tensors: it is copied, sent and read without pickle."""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import boxes

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_PLAIN = (bool, int, float, str, type(None))


def take_apart(value: Any, where: str = "state") -> tuple[Any, list[torch.Tensor]]:
    """A description of `value` for JSON, and the tensors that it numbers: of a sharded one this rank's part. `where`
    names the value in errors."""
    tensors: list[torch.Tensor] = []
    return _described(value, tensors, where), tensors


def _described(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _described_tensor(value.detach(), tensors, where)
    if isinstance(value, dict):
        pairs = [
            [_described(key, tensors, f"a key of {where}"), _described(one, tensors, f"{where}[{key!r}]")]
            for key, one in value.items()
        ]
        described = {"dict": pairs}
        # Of a module's state: the versions by which modules read the states of older ones.
        if hasattr(value, "_metadata"):
            described["metadata"] = _described(dict(value._metadata), tensors, f"the metadata of {where}")
        return described
    if type(value) in (list, tuple):
        parts = [_described(one, tensors, f"{where}[{number}]") for number, one in enumerate(value)]
        return parts if type(value) is list else {"tuple": parts}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if type(value) is set:
        # In one order on every rank.
        return {"set": [_described(one, tensors, f"an element of {where}") for one in sorted(value, key=repr)]}
    if getattr(value, "shape", None) == () and type(getattr(value, "item", lambda: ...)()) in _PLAIN:
        # A number of NumPy's, such as a learning rate that it computed, is that number.
        return value.item()
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: a state that is sent or saved holds tensors, "
        "numbers, text, bytes, and lists, tuples, sets and dicts of these. Leave it out, or put it into such"
    )


def _described_tensor(tensor: torch.Tensor, tensors: list[torch.Tensor], where: str) -> dict[str, Any]:
    described = {}
    if boxes.is_sharded(tensor):
        try:
            described["sharded"] = boxes.describe(tensor)
        except ValueError as error:
            raise TypeError(f"{where} cannot be in a snapshot: {error}") from None
        tensor = tensor.to_local()
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"{where} is a sparse or quantized tensor: a snapshot holds dense ones")
    tensors.append(tensor)
    return {"tensor": len(tensors) - 1, "shape": list(tensor.shape), "dtype": str(tensor.dtype)[6:], **described}


def plain(value: Any) -> Any:
    """A value with the same tensors that `torch.load(weights_only=True)` reads. Raises TypeError if it holds what no
    state may."""
    return put_together(*take_apart(value))


def tensors_of(description: Any) -> list[dict[str, Any]]:
    """The descriptions of the tensors, in their order."""
    found: list[dict[str, Any]] = []
    _walk(description, found.append)
    return found


def _walk(description: Any, each: Callable[[dict[str, Any]], None]) -> None:
    if isinstance(description, list):
        for one in description:
            _walk(one, each)
    elif isinstance(description, dict):
        if "tensor" in description:
            each(description)
        for name in ("dict", "tuple", "set", "metadata"):
            _walk(description.get(name), each)


def names_of(description: Any) -> list[str]:
    """The tensors' names in their order, such as `model.layer.weight`. Raises ValueError if two have the same."""
    named = dict(_named(description, ()))
    if len(set(named.values())) < len(tensors_of(description)):
        raise ValueError("two tensors of the state have one name, by the keys on the way to them with dots between")
    return [named[number] for number in range(len(named))]


def _named(description: Any, way: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    if isinstance(description, list):
        for number, one in enumerate(description):
            yield from _named(one, (*way, str(number)))
    elif isinstance(description, dict):
        if "tensor" in description:
            yield description["tensor"], ".".join(way)
        for key, one in description.get("dict", ()):
            yield from _named(one, (*way, str(key)))
        yield from _named(description.get("tuple"), way)


def to_bytes(description: Any) -> torch.Tensor:
    """A description in the form in which it is sent."""
    return torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)


def of_bytes(text: torch.Tensor) -> Any:
    """The description that was sent."""
    return json.loads(bytes(text.untyped_storage()))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, in order, on the CPU. It is the same memory if it is there already."""
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8)


def sum_of_bits(numbers: torch.Tensor) -> torch.Tensor:
    """Of a contiguous run. Words of eight bytes are added far faster than shorter ones: these are converted first."""
    size = numbers.element_size()
    if numbers.storage_offset() * size % 8:
        numbers = numbers.clone()
    whole = numbers.numel() * size // 8 * 8 // size
    total = numbers[:whole].view(torch.int64).sum()
    return total if whole == numbers.numel() else total + numbers[whole:].view(_WORDS[size]).sum(dtype=torch.int64)


def room_for(description: Any) -> list[torch.Tensor]:
    """Tensors on the CPU for the numbers that are described, in their order."""
    return [torch.empty(one["shape"], dtype=dtype_of(one)) for one in tensors_of(description)]


def size_of(described: dict[str, Any]) -> int:
    """The bytes of a described tensor."""
    return torch.Size(described["shape"]).numel() * dtype_of(described).itemsize


def dtype_of(described: dict[str, Any]) -> torch.dtype:
    """The numbers of a described tensor."""
    found = getattr(torch, described["dtype"], None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this PyTorch has no numbers of the kind {described['dtype']!r}")
    return found


def put_together(description: Any, tensors: list[torch.Tensor], mesh: Any = None) -> Any:
    """The value of a description, with these tensors. `mesh` gives the device mesh of what is described as sharded."""
    if isinstance(description, list):
        return [put_together(one, tensors, mesh) for one in description]
    if not isinstance(description, dict):
        return description
    if "tensor" in description:
        return placed(description, tensors[description["tensor"]], mesh)
    if "tuple" in description:
        return tuple(put_together(one, tensors, mesh) for one in description["tuple"])
    if "bytes" in description:
        return base64.b64decode(description["bytes"])
    if "set" in description:
        return {put_together(one, tensors, mesh) for one in description["set"]}
    pairs = [[put_together(one, tensors, mesh) for one in pair] for pair in description["dict"]]
    if "metadata" not in description:
        return dict(pairs)
    # As a module gives it: a dict that can have attributes, and that torch.load(weights_only=True) knows.
    state = OrderedDict(pairs)
    state._metadata = put_together(description["metadata"], tensors, mesh)
    return state


def placed(described: dict[str, Any], tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The tensor of a description with the numbers of `tensor`: on a device mesh, if it is sharded."""
    sharded = described.get("sharded")
    if sharded is None or boxes.is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    on = mesh(sharded)
    return DTensor.from_local(
        tensor.to(on.device_type),
        on,
        [_placement(text) for text in sharded["placements"]],
        run_check=False,
        shape=torch.Size(sharded["shape"]),
        stride=tuple(sharded["stride"]),
    )


def _placement(text: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    dimension, pieces = boxes.sharded_dimension(text), boxes.pieces_before(text)
    if pieces is not None:
        from torch.distributed.tensor.placement_types import _StridedShard

        return _StridedShard(dimension, split_factor=pieces)
    return Replicate() if dimension is None else Shard(dimension)
