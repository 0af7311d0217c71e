"""Two copies of a state in memory that outlives the process: a new one replaces the older, and only a whole one counts.

    a slot: head (mark, step, round, lengths, checksum of the description) │ tensors, each at its place │ description
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import boxes, tree

_MAGIC = b"elastic1"
# Mark, count of fills, step, round, bytes of tensors, bytes of description, checksum of the description.
_HEAD = struct.Struct("<8sQQQQQI")
_PAGE = 4096
# Every tensor begins where any kind of number may.
_ALIGNED = 64
# What is copied before its checksum is made: it is in the core's cache then.
_CHUNK = 1 << 18


def _up(number: int, to: int) -> int:
    return -(-number // to) * to


class Snapshot:
    """What a slot holds. It may be read until a `fill` takes the slot."""

    def __init__(self, memory: mmap.mmap, at: int) -> None:
        """Raises ValueError if the slot at this place is not whole."""
        mark, self.count, self.step, self.round, size, length, checksum = _HEAD.unpack_from(memory, at)
        self.head = (self.step, self.round, size, length, checksum)
        self.at, begin = at, at + _PAGE
        if mark != _MAGIC or begin + size + length > len(memory):
            raise ValueError("the slot is not whole")
        text = memory[begin + size : begin + size + length]
        if zlib.crc32(text) != checksum:
            raise ValueError("the slot's description is damaged")
        about = json.loads(text)
        self.facts: dict[str, Any] = about["facts"]
        # What the rank that made it was.
        self.rank, self.world_size = about["place"]
        layout = about.get("layout")
        self.layout = boxes.Layout(*map(tuple, layout)) if layout else None
        self.description, self._places, self._checksums = about["state"], about["places"], about["checksums"]
        self.memory, self._begin = memory, begin

    def check(self) -> None:
        """Compares all checksums. Raises ValueError if one is not that of the tensor."""
        with memoryview(self.memory) as view:
            for one, place, checksum in zip(tree.tensors_of(self.description), self._places, self._checksums):
                begin = self._begin + place
                with view[begin : begin + tree.size_of(one)] as part:
                    if f"{zlib.crc32(part):08x}" != checksum:
                        raise ValueError(f"tensor {one['tensor']} of the snapshot of step {self.step} is damaged")

    def drop(self) -> None:
        """It counts no longer."""
        self.memory[self.at : self.at + len(_MAGIC)] = b"\0" * len(_MAGIC)

    def raw(self) -> torch.Tensor:
        """All bytes but the head's, in the memory itself."""
        return self._bytes(0, sum(self.head[2:4]))

    def tensors(self) -> list[torch.Tensor]:
        """Its tensors, in the memory itself: of a sharded one, this part. `torch.save` writes no more than each."""
        tensors = []
        for one, place in zip(tree.tensors_of(self.description), self._places):
            tensors.append(self._bytes(place, tree.size_of(one)).view(tree.dtype_of(one)).view(one["shape"]))
        return tensors

    def state(self) -> Any:
        """The state, its tensors in the memory itself."""
        return tree.put_together(self.description, self.tensors())

    def copy(self, mesh: Any = None) -> Any:
        """The state, its tensors copies: an optimizer keeps those that it is given. `mesh` gives the device mesh of
        what is described as sharded."""
        return tree.put_together(self.description, [one.clone() for one in self.tensors()], mesh)

    def _bytes(self, place: int, size: int) -> torch.Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=self._begin + place)


class Plan:
    """Where a state's tensors go in a slot."""

    def __init__(
        self, state: Any, facts: dict[str, Any], place: tuple[int, int], layout: boxes.Layout | None = None
    ) -> None:
        """facts: what tells this training's states from another's. place: the rank, and the number of ranks."""
        self.description, self.tensors = tree.take_apart(state)
        self.facts, self.place, self.layout = facts, place, layout
        # Whether any of its tensors is only this rank's part.
        self.is_sharded = False
        self.places, self.size, largest = [], 0, 0
        for one in tree.tensors_of(self.description):
            self.is_sharded = self.is_sharded or "sharded" in one
            self.places.append(self.size)
            self.size += _up(tree.size_of(one), _ALIGNED)
            largest += _up(tree.size_of({**one, "shape": boxes.largest(one)}), _ALIGNED)
        self._text = len(self.text([0] * len(self.tensors)))
        # Any rank's part has room in a slot of this size.
        self.slot = _PAGE + largest + self._text

    def text(self, checksums: list[int]) -> bytes:
        """The description. Its length does not depend on the checksums."""
        hexadecimal = [f"{one:08x}" for one in checksums]
        about = {"facts": self.facts, "place": self.place, "state": self.description, "places": self.places}
        if self.layout is not None:
            about["layout"] = dataclasses.astuple(self.layout)
        about["checksums"] = hexadecimal
        return json.dumps(about, separators=(",", ":")).encode()

    def memory_bytes(self) -> int:
        """The memory for two slots of this size. It has room for longer numbers, such as a step's: all states of one
        training need the same."""
        return 2 * _up(self.slot + self._text // 4 + 2 * _PAGE, 1 << 16)


class Slots:
    """The two slots of a memory, or of one of several equal shares of it."""

    def __init__(self, memory: mmap.mmap, share: int = 0, shares: int = 1) -> None:
        """share: which of the `shares` of the memory."""
        self._memory, self._half = memory, len(memory) // (2 * shares) // _PAGE * _PAGE
        self._begin = 2 * share * self._half
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        # What this process has put into each slot and does not put there again: places, and checksums by what is there.
        self._kept: dict[int, dict[tuple[int, int, int], int]] = {}

    def fits(self, plan: Plan) -> bool:
        """Whether a slot has room for it."""
        return plan.slot <= self._half

    def whole(self) -> list[Snapshot]:
        """The snapshots that are whole, the newest first."""
        found = []
        for at in (self._begin, self._begin + self._half):
            try:
                found.append(Snapshot(self._memory, at))
            except ValueError:
                pass
        return sorted(found, key=lambda one: one.count, reverse=True)

    def begin(self, kept: Snapshot | None) -> tuple[int, int]:
        """Makes room for a snapshot in the slot without `kept`, else in that without the newest. Returns the place, and
        the count of the fill."""
        whole = self.whole()
        if kept is not None and kept.memory is not self._memory:
            kept = None
        newest = whole[0].count if whole else 0
        second = self._begin + self._half
        taken = kept.at if kept else whole[0].at if whole else second
        at = second if taken == self._begin else self._begin
        self._mark(at, b"\0" * len(_MAGIC))
        return at, newest + 1

    def fill(
        self,
        place: tuple[int, int],
        step: int,
        round_: int,
        plan: Plan,
        on_host: Sequence[torch.Tensor],
        changes: Mapping[int, int],
    ) -> None:
        """Copies a state, whose tensors are `on_host`. It is not whole before `complete`. changes: how often a tensor
        that seldom changes has done so, by its place in memory. What the slot holds of it is not copied again."""
        at = place[0]
        before, kept = self._kept.pop(at, {}), {}
        checksums = []
        for offset, one in zip(plan.places, on_host):
            number = changes.get(one.data_ptr())
            key = (offset, one.data_ptr(), -1 if number is None else number)
            checksums.append(before[key] if key in before else self._copy(at + _PAGE + offset, one))
            if number is not None:
                kept[key] = checksums[-1]
        self._kept[at] = kept
        text = plan.text(checksums)
        end = at + _PAGE + plan.size
        self._memory[end : end + len(text)] = text
        self._put_head(place, (step, round_, plan.size, len(text), zlib.crc32(text)))

    def adopt(self, head: tuple[int, int, int, int, int]) -> tuple[tuple[int, int], torch.Tensor] | None:
        """Makes room for another memory's snapshot of this head. Returns the place, and the bytes for what `raw` gives.
        It is not whole before `complete`. None if there is no room."""
        size = sum(head[2:4])
        if _PAGE + size > self._half:
            return None
        place = self.begin(None)
        self._kept.pop(place[0], None)
        self._put_head(place, head)
        return place, torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=place[0] + _PAGE)

    def complete(self, place: tuple[int, int]) -> Snapshot:
        """Marks the slot complete. A worker killed before this leaves the other slot as the newest."""
        self._mark(place[0], _MAGIC)
        return Snapshot(self._memory, place[0])

    def _put_head(self, place: tuple[int, int], head: tuple[int, int, int, int, int]) -> None:
        at, count = place
        _HEAD.pack_into(self._memory, at, b"\0" * len(_MAGIC), count, *head)

    def _mark(self, at: int, mark: bytes) -> None:
        self._memory[at : at + len(mark)] = mark

    def _copy(self, at: int, tensor: torch.Tensor) -> int:
        """Copies a tensor's bytes. Returns their checksum. Neither call holds the interpreter's lock."""
        flat = tensor.contiguous()
        size, checksum = flat.numel() * flat.element_size(), 0
        with memoryview(self._memory) as view:
            for begin in range(0, size, _CHUNK):
                length = min(_CHUNK, size - begin)
                ctypes.memmove(self._address + at + begin, flat.data_ptr() + begin, length)
                with view[at + begin : at + begin + length] as part:
                    checksum = zlib.crc32(part, checksum)
        return checksum
