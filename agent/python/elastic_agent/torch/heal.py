"""Follows a training that this worker has no place in yet: feed.py is the other end."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from typing import Any

import torch

from .. import worker
from . import feed
from .state import Training
from .store import Store

# The part of the time for a worker's start that it may take to heal.
_SHARE = 0.8


class Healing:
    """A thread that gives this worker the parameters of a rank that trains, and what its optimizers keep; then it does
    that rank's steps. What it has is whole only after `state.share`."""

    def __init__(self, training: Training, connection: socket.socket, timeout: float) -> None:
        """timeout: seconds for the next piece of what is sent, and to get a place once this has caught up."""
        self._optimizers, self._connection, self._timeout = training.optimizers, connection, timeout
        self._parameters = list(training.model.parameters())
        self._moved, self._over, self._caught_up = threading.Condition(), False, False
        # Whether the other rank has left its group, and does no step before the next.
        self._rests = False
        # The steps that are done here, and whether anything has come.
        self.step, self.has_begun = 0, False
        self._thread = threading.Thread(target=self._follow, name="elastic-session-heal", daemon=True)
        self._thread.start()

    def catch_up(self, seconds: float) -> None:
        """Waits until this has all parameters and about all steps, or until it is no use to wait."""
        with self._moved:
            self._moved.wait_for(lambda: self._caught_up or self._over, seconds)
            is_late = not self._caught_up
        if is_late:
            self.end()

    def reach(self, step: int) -> None:
        """Waits until this has done `step` steps, or cannot, and ends."""
        began, done = time.monotonic(), self.step
        with self._moved:
            while self.step < step and not (self._over or self._rests) and time.monotonic() < began + self._timeout:
                self._moved.wait(self._timeout)
                if self.step > done:
                    began, done = time.monotonic(), self.step
        self.end()

    def end(self) -> None:
        """Nothing changes after this."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The other end has closed it.
        self._thread.join()

    def _follow(self) -> None:
        until = None
        try:
            with self._connection:
                while until is None or time.monotonic() < until:
                    message = feed.receive(self._connection)
                    self.has_begun = True
                    for number, value, states in message.get("part", ()):
                        self._take(self._parameters[number], value, states)
                    if "step" in message:
                        self._do(*message["step"])
                    with self._moved:
                        self._rests = "rests" in message or (self._rests and "step" not in message)
                        self._caught_up |= message.get("lacks") == 0 and message["behind"] == 0
                        self._moved.notify_all()
                    if self._caught_up and until is None:
                        # There may be no place for this worker for long.
                        until = time.monotonic() + self._timeout
        except Exception:  # noqa: BLE001: whatever it is, this worker then gets all in its round.
            pass
        with self._moved:
            self._over = True
            self._moved.notify_all()

    @torch.no_grad()
    def _take(self, parameter: torch.nn.Parameter, value: torch.Tensor, states: list[Any]) -> None:
        parameter.copy_(value)
        for number, kept in states:
            self._optimizers[number].state[parameter] = {
                name: one.to(parameter.device) if on_gpu else one for name, (one, on_gpu) in kept.items()
            }

    def _do(self, step: int, numbers: list[int], gradients: list[torch.Tensor], stepped: dict[int, Any]) -> None:
        """Does a step as the other rank did."""
        for number, one in zip(numbers, gradients):
            self._parameters[number].grad = one.to(self._parameters[number].device)
        for number, groups in stepped.items():
            for own, theirs in zip(self._optimizers[number].param_groups, groups):
                own.update(theirs)
            self._optimizers[number].step()
        for number in numbers:
            self._parameters[number].grad = None
        self.step = step


def begin(training: Any, word: int, timeout: float) -> Healing | None:
    """Finds a rank that trains, and begins to follow it. Returns when this has caught up. None if there is none, or a
    newcomer to this training has to get all in its round. word: which session this is."""
    running = worker.running_round() if feed.can_heal(training) else None
    if running is None:
        return None
    try:
        store = Store(running)
        count = store.add("feeds", 0)
        key = f"feed/{1 + secrets.randbelow(count)}" if count else ""
        if not count or not store.check([key]):
            return None
        host, port, token, theirs = json.loads(store.get(key))
        if theirs != word:
            return None
        connection = socket.create_connection((host, port), timeout)
        connection.sendall(bytes.fromhex(token))
    except (OSError, RuntimeError, ValueError):
        return None
    healing = Healing(training, connection, timeout)
    healing.catch_up(_SHARE * running["left_ms"] / 1000)
    return healing if healing.has_begun else None
