"""Follows a training that this worker has no place in yet: feed.py is the other end."""

from __future__ import annotations

import json
import math
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from .. import worker
from . import feed, tree
from .state import Training
from .store import Store

# The part of the time for a worker's start that it may take to heal.
_SHARE = 0.8
# Seconds between two looks at whether it is no use to wait.
_LOOK = 0.05


class Healing:
    """A thread that gives this worker the parameters of a rank that trains, and what its optimizers keep; then it does
    that rank's steps. What it has is whole only after `rest`."""

    def __init__(self, training: Training, connection: socket.socket, number: int, timeout: float) -> None:
        """number: what the other rank knows this by. timeout: seconds for the next piece of what is sent, and to get a
        place once this has caught up."""
        self._training, self._connection, self._number, self._timeout = training, connection, number, timeout
        self._optimizers, self._parameters = training.optimizers, list(training.model.parameters())
        self._moved, self._over, self._caught_up = threading.Condition(), False, False
        # When it ends: there may be no place for this worker for long.
        self._until = math.inf
        # Whether anything has come, and the whole state once this has all of it.
        self.has_begun, self._value = False, None
        # What has come, and is to be done; and whether that was all.
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue(2)
        self._ended = False
        threading.Thread(target=self._receive, name="elastic-session-receive", daemon=True).start()
        self._thread = threading.Thread(target=self._follow, name="elastic-session-heal", daemon=True)
        self._thread.start()

    def catch_up(self, seconds: float) -> None:
        """Waits until this has all parameters and about all steps, or until it is no use to wait."""
        with self._moved:
            self._moved.wait_for(lambda: self._caught_up or self._over, seconds)
            is_late = not self._caught_up
        if is_late:
            self.end()

    def number(self) -> int:
        """What the rank that this follows knows it by, which may now send the rest. 0 if it does not follow any more."""
        with self._moved:
            if self._over or not self._caught_up:
                return 0
            self._until = math.inf
            return self._number

    def rest(self, is_lost: Callable[[], bool]) -> Any:
        """Waits until this has the whole state, and ends. Returns the state to load; None if it does not come, or
        `is_lost`."""
        with self._moved:
            while self._value is None and not self._over and not is_lost():
                self._moved.wait(_LOOK)
        self.end()
        return self._value

    def end(self) -> None:
        """Nothing changes after this."""
        feed.shut_down(self._connection)
        self._thread.join()

    def _receive(self) -> None:
        """While what came before is done."""
        with self._connection:
            try:
                while True:
                    self._messages.put(feed.receive(self._connection))
            except Exception:  # noqa: BLE001: whatever it is, nothing more comes.
                self._messages.put({"ends": True})

    def _follow(self) -> None:
        try:
            while time.monotonic() < self._until and not self._ended and self._value is None:
                self._do(self._next())
        except Exception:  # noqa: BLE001: whatever it is, this worker then gets all in its round.
            pass
        with self._moved:
            self._over = True
            self._moved.notify_all()
        feed.shut_down(self._connection)
        while not self._ended:
            self._next()

    def _next(self) -> dict[str, Any]:
        message = self._messages.get()
        self._ended = "ends" in message
        return message

    def _do(self, message: dict[str, Any]) -> None:
        for number, value, states in message.get("part", ()):
            self._take(self._parameters[number], value, states)
        if "gradients" in message:
            self._apply(*message["gradients"])
        if "state" in message:
            self._value = self._whole(json.loads(message["state"]), message["bits"])
        with self._moved:
            self.has_begun |= not self._ended
            if not self._caught_up and message.get("lacks") == 0 and message["behind"] == 0:
                self._caught_up, self._until = True, time.monotonic() + self._timeout
            self._moved.notify_all()

    @torch.no_grad()
    def _take(self, parameter: torch.nn.Parameter, value: torch.Tensor, states: list[Any]) -> None:
        parameter.copy_(value)
        for number, kept in states:
            self._optimizers[number].state[parameter] = {
                name: one.to(parameter.device) if on_gpu else one for name, (one, on_gpu) in kept.items()
            }

    def _whole(self, description: Any, bits: list[int]) -> Any:
        """The state that is described, of what this has and what differs."""
        tensors = self._of_same_names(description)
        lacks = self._that_differ(tensors, bits)
        feed.send(self._connection, *tree.take_apart({"lacks": lacks}))
        for at, one in zip(lacks, self._next()["rest"]):
            tensors[at] = one
        return tree.put_together(description, tensors)

    def _of_same_names(self, description: Any) -> list[torch.Tensor | None]:
        """The tensors of this worker that can be those of a description."""
        mine, tensors = tree.take_apart(self._training.value())
        own = {name: (one, at) for name, at, one in zip(tree.names_of(mine), tree.tensors_of(mine), tensors)}
        found = []
        for name, described in zip(tree.names_of(description), tree.tensors_of(description)):
            one, at = own.get(name, (None, {}))
            alike = (at.get("shape"), at.get("dtype")) == (described["shape"], described["dtype"])
            found.append(one if alike else None)
        return found

    def _that_differ(self, tensors: list[torch.Tensor | None], bits: list[int]) -> list[int]:
        return [at for at, (one, theirs) in enumerate(zip(tensors, bits)) if one is None or feed.bits_of(one) != theirs]

    def _apply(self, optimizer: int, groups: list[dict[str, Any]], gradients: list[Any]) -> None:
        """Does a part of a step, as the other rank did."""
        for number, one in gradients:
            self._parameters[number].grad = one.to(self._parameters[number].device)
        for own, theirs in zip(self._optimizers[optimizer].param_groups, groups):
            own.update(theirs)
        self._optimizers[optimizer].step()
        for number, _ in gradients:
            self._parameters[number].grad = None


def begin(training: Any, word: int, timeout: float) -> Healing | None:
    """Finds a rank that trains, and begins to follow it. Returns when this has caught up. None if there is none, or a
    newcomer to this training has to get all in its round. word: which session this is."""
    running = worker.running_round() if feed.can_heal(training) else None
    if running is None:
        return None
    try:
        store = Store(running)
        count = store.add("feeds", 0)
        if not count:
            return None
        host, port, token, theirs = json.loads(store.get(f"feed/{1 + secrets.randbelow(count)}"))
        if theirs != word:
            return None
        connection = feed.at_once(socket.create_connection((host, port), timeout), timeout)
        number = secrets.randbits(62) + 1
        connection.sendall(bytes.fromhex(token) + feed.NUMBER.pack(number))
    except (OSError, RuntimeError, ValueError):
        return None
    healing = Healing(training, connection, number, timeout)
    healing.catch_up(_SHARE * running["left_ms"] / 1000)
    return healing if healing.has_begun else None
