"""What a script keeps beside the session's state, and changes while it trains: a newcomer would not get it."""

from __future__ import annotations

import json
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from ...batches import ElasticBatchSampler
from .. import tree
from ..loop import Elastic
from ..state import Progress, State, leaves

# Types with a position of their own, which are no state.
_OTHERS = (Elastic, ElasticBatchSampler, State, DataLoader, torch.utils.data.Dataset)
# The session's argument for a type, by the type's module.
_ARGUMENTS = {"lr_scheduler": "scheduler", "grad_scaler": "scaler"}


class Outside:
    """Looks at the variables of the script's functions after each step."""

    def __init__(
        self, training: Progress, sums_of: Callable[[torch.Tensor], list[float]], is_own: Callable[[str], bool]
    ) -> None:
        """is_own: whether a file belongs to the script."""
        self._sums_of, self._is_own = sums_of, is_own
        parts = list(leaves(training._state))
        modules = [module for one in parts if isinstance(one, torch.nn.Module) for module in one.modules()]
        tensors = [one for module in modules for one in (*module.parameters(False), *module.buffers(False))]
        # While these objects live, no other object gets their ids.
        self._inside = {id(one): one for one in (*parts, *modules, *tensors)}
        self._shapes = {one.shape for one in training.parameters() if one.numel() > 1}
        self._first: dict[tuple[str, int], tuple[Any, Any]] = {}
        self._told: set[str] = set()

    def look(self, frames: Iterable[FrameType]) -> Iterator[dict[str, str]]:
        """What has changed since it was first seen: its name, its type, the line that makes it, and the argument of a
        session that takes it."""
        for name, one, path in self._variables(list(frames)):
            if name in self._told or id(one) in self._inside or isinstance(one, _OTHERS):
                continue
            now = self._fingerprint(one)
            if now is None:
                continue
            _, first = self._first.setdefault((name, id(one)), (one, now))
            if first != now:
                self._told.add(name)
                kind = type(one)
                argument = _ARGUMENTS.get(kind.__module__.rpartition(".")[2], "")
                yield {"what": name, "type": kind.__name__, "where": _line_of(name, path), "argument": argument}

    def _variables(self, frames: list[FrameType]) -> Iterator[tuple[str, Any, str]]:
        seen: set[int] = set()
        for frame in frames:
            path = frame.f_code.co_filename
            for variables in (frame.f_locals, frame.f_globals):
                for name, one in list(variables.items()):
                    if name.startswith("__") or id(one) in seen:
                        continue
                    seen.add(id(one))
                    yield name, one, path
                    if self._is_of_a_script(one):
                        for attribute, part in list(vars(one).items()):
                            yield f"{name}.{attribute}", part, path

    def _fingerprint(self, one: Any) -> Any:
        """A value that differs once the object has changed; None for an object without state."""
        if isinstance(one, torch.nn.Module):
            found = [part for part in one.parameters() if id(part) not in self._inside]
            return [self._sums_of(part) for part in found] or None
        if isinstance(one, torch.Tensor):
            return self._sums_of(one) if self._is_like_a_parameter(one) else None
        if type(one) in (list, tuple, dict):
            found = list(one.values()) if isinstance(one, dict) else list(one)
            alike = found and all(isinstance(part, torch.Tensor) and self._is_like_a_parameter(part) for part in found)
            return [self._sums_of(part) for part in found] if alike else None
        if isinstance(one, type) or not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            return None
        try:
            description, tensors = tree.take_apart(one.state_dict())
        except Exception:  # noqa: BLE001: the script's own object, whatever it raises.
            return None
        return json.dumps(description), [self._sums_of(part) for part in tensors]

    def _is_like_a_parameter(self, tensor: torch.Tensor) -> bool:
        return id(tensor) not in self._inside and tensor.is_floating_point() and tensor.shape in self._shapes

    def _is_of_a_script(self, one: Any) -> bool:
        """Whether an object is of a class that the script defines itself, and no module."""
        if isinstance(one, (torch.nn.Module, type, *_OTHERS)) or not hasattr(one, "__dict__"):
            return False
        return self._is_own(os.path.realpath(getattr(sys.modules.get(type(one).__module__), "__file__", None) or "/"))


def _line_of(name: str, path: str) -> str:
    """Where a variable gets its value first."""
    pattern = re.compile(rf"\b{re.escape(name.rpartition('.')[2])}\b[^=(\[]*=[^=]")
    for number, line in enumerate(linecache.getlines(path), 1):
        if pattern.search(line):
            return f"{os.path.basename(path)}:{number}"
    return os.path.basename(path)
