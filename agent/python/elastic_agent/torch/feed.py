"""Gives a worker that has no place yet the state, while the others train: so that they need not wait when its node joins.
heal.py is the other end.

    it connects ──▶ before a step: some parameters, with what the optimizers keep of them
                ──▶ in each step: the gradients of all parameters that it has
                ──▶ … ──▶ it has all parameters, and every step: its node joins
                ──▶ in its round, while the others compute: the last gradients, and what differs then

A parameter and its gradient suffice, because PyTorch's optimizers change each parameter by itself. Gradients are those
that the optimizers get: summed, unscaled, clipped. What else is in a state, and what the script changes by itself, the
newcomer gets in the end: it compares the bits of all tensors. No rank applies a step without the newcomer, so what is
compared does not change meanwhile.
"""

from __future__ import annotations

import collections
import ctypes
import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from .. import worker
from . import tree
from .operations import Errand
from .state import Progress, Training
from .store import Store

# Bytes that go to the kernel at once.
_PIECE = 4 << 20
# The least bytes of parameters that are copied before a step, and the parts of a state that these make at most. The bytes
# of gradients that the newcomer applies at once, while the next ones come.
_PART, _PARTS, _APPLIED = 16 << 20, 16, 32 << 20
# The most steps that wait to be sent, unless they take less than so many bytes.
_STEPS, _STEPS_BYTES = 4, 64 << 20
# How many times as long as the one before a step may wait for a newcomer that has all parameters.
_LAST_WAITS = 3
# Newcomers that one rank feeds, and seconds for a first word: a secret, and the newcomer's number.
_NEWCOMERS, _GREETING = 2, 5.0
_TOKEN = 16
_HEAD = NUMBER = struct.Struct(">Q")


def can_heal(training: Progress) -> bool:
    """Whether a newcomer can follow this training by its gradients, if every rank holds all of it: its optimizers are
    PyTorch's. A fused one with a GradScaler decides by itself whether to skip a step. It has not run on a GPU."""
    if type(training) is not Training:
        return False
    optimizers = training.optimizers
    fused = training.scaler is not None and any(hasattr(one, "_step_supports_amp_scaling") for one in optimizers)
    return not fused and all(type(one).__module__.startswith("torch.optim.") for one in optimizers)


def at_once(connection: socket.socket, timeout: float) -> socket.socket:
    """A connection for which each piece may take `timeout` seconds. A short piece does not wait until the one before is
    acknowledged: where the other end has to answer first, that takes 40 ms."""
    connection.settimeout(timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send(connection: socket.socket, description: Any, tensors: list[torch.Tensor]) -> None:
    """Sends a value that is taken apart. Each piece may take the connection's timeout. Raises OSError."""
    text = tree.to_bytes(description)
    connection.sendall(_HEAD.pack(len(text)))
    for one in (text, *tensors):
        # The view alone does not keep the memory.
        held = tree.as_bytes(one)
        left = _memory(held)
        while left:
            left = left[connection.send(left[:_PIECE]) :]


def receive(connection: socket.socket) -> Any:
    """What the other end sends next. Raises OSError, also where the connection ends."""
    head = torch.empty(_HEAD.size, dtype=torch.uint8)
    fill(connection, head)
    (length,) = _HEAD.unpack(_memory(head))
    text = torch.empty(length, dtype=torch.uint8)
    fill(connection, text)
    description = tree.of_bytes(text)
    tensors = tree.room_for(description)
    for one in tensors:
        fill(connection, tree.as_bytes(one))
    return tree.put_together(description, tensors)


def bits_of(tensor: torch.Tensor) -> int:
    """A number that is the same for the same bits."""
    return int(tree.sum_of_bits(tensor.contiguous().reshape(-1)))


def fill(connection: socket.socket, room: torch.Tensor) -> None:
    """Receives as many bytes as there is room for. Raises OSError, also where the connection ends."""
    left = _memory(room)
    while left:
        count = connection.recv_into(left[:_PIECE])
        if not count:
            raise ConnectionResetError("the other end has closed the connection")
        left = left[count:]


def _memory(tensor: torch.Tensor) -> memoryview:
    """The memory of bytes on the CPU."""
    size = tensor.numel()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b"")


class _Feed:
    """What one newcomer gets. The session's thread queues it, and another sends it."""

    def __init__(self, connection: socket.socket, number: int, training: Training, timeout: float) -> None:
        self.number = number
        self._connection, self._training, self._timeout = at_once(connection, timeout), training, timeout
        parameters = list(enumerate(training.model.parameters()))
        self._has, self._lacks = [], collections.deque(parameters)
        self._part = max(_PART, sum(map(self._bytes, (one for _, one in parameters))) // _PARTS)
        self._most = 4 * self._part
        self._queue: collections.deque[tuple[dict[str, Any], Any]] = collections.deque()
        self._moved = threading.Condition()
        # Whether the newcomer has a place, and gets what is left; and whether it gets no more.
        self._ends = self.over = False
        # The gradients of the step under way.
        self._gradients: dict[torch.nn.Parameter, tuple[int, torch.Tensor]] = {}
        self._hooks: list[Any] = []
        # Of the tensors of the whole state, when the newcomer has its place: how often each has changed, and their bits.
        self._versions: list[int] = []
        self._bits: Errand | None = None
        self._asked = time.monotonic()
        threading.Thread(target=self._send, name="elastic-session-feed", daemon=True).start()

    def before_step(self) -> None:
        """The gradients of a step are there. A step may wait for the newcomer as long as the one before took, and longer
        when it has all parameters: what is left then, all wait for in its round. Not where a round waits for this."""
        pace = (time.monotonic() - self._asked) * (1 if self._lacks else _LAST_WAITS) * (worker.forming() is None)
        with self._moved:
            self._moved.wait_for(lambda: self.over or self._ends or not self._steps_waiting(), pace)
            # One that has a place takes part in a step when it has all.
            if self._ends or self._is_too_slow() or _has_ended(self._connection):
                self.end()
            idle, is_due = not self._queue, not any("part" in one for one, _ in self._queue)
        self._asked = time.monotonic()
        if self.over:
            return
        if self._lacks and is_due:
            if idle and self._has:
                # The link is faster than the steps.
                self._part = min(2 * self._part, self._most)
            self._put("part", list(self._next_part()))
        graded = [(number, one) for number, one in self._has if one.grad is not None]
        self._gradients = {one: (number, one.grad.detach().to("cpu", copy=True)) for number, one in graded}
        for number, one in enumerate(self._training.optimizers):
            self._hooks.append(one.register_step_pre_hook(lambda one, *_, at=number: self._steps(at, one)))

    def after_step(self) -> None:
        """The step is applied."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if not self.over:
            self._put("step", self._training.step_number)
        self._gradients = {}

    def end(self) -> None:
        """The newcomer gets no more."""
        with self._moved:
            self.over = True
            self._queue.clear()
            self._moved.notify_all()
        shut_down(self._connection)

    def tries(self, call: Callable[[], None]) -> None:
        """Training continues where something cannot be sent, or there is no memory."""
        try:
            call()
        except (RuntimeError, TypeError):
            self.end()

    @property
    def can_end(self) -> bool:
        """Whether the newcomer may have its place now: it lacks no parameter."""
        return not (self.over or self._ends or self._lacks)

    def end_with_rest(self) -> None:
        """The newcomer has its place, and gets what it still lacks of the state as it is now, until the next step is
        applied."""
        description, tensors = tree.take_apart(self._training.value())
        late = {one.data_ptr() for _, one in self._has}
        for _, parameter in self._has:
            late.update(one.data_ptr() for _, kept in self._states(parameter) for one in kept.values() if _is_tensor(one))
        # A forward pass changes buffers, and the script what is its own.
        tensors = [one if one.data_ptr() in late else one.clone() for one in tensors]
        self._versions = [one._version for one in tensors]
        # While the last gradients are sent.
        self._bits = Errand(lambda: list(map(bits_of, tensors)))
        with self._moved:
            self._ends = True
            self._queue.append(({"state": json.dumps(description)}, tensors))
            self._moved.notify_all()

    def _is_too_slow(self) -> bool:
        """Whether many steps wait, and not only small ones."""
        gradients = sum(_size(one) for described, some in self._queue if "gradients" in described for one in some)
        return self._steps_waiting() > _STEPS and gradients > _STEPS_BYTES

    def _steps_waiting(self) -> int:
        """How many steps are done here, and not sent to their ends."""
        return sum("step" in one for one, _ in self._queue)

    def _steps(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps, with the settings that a scheduler has just given it: a GradScaler may leave a step out."""
        groups = [{name: one for name, one in group.items() if name != "params"} for group in optimizer.param_groups]
        own = [one for group in optimizer.param_groups for one in group["params"]]
        try:
            settings = _copied(groups)
        except TypeError:
            self.end()
            return
        some: list[list[Any]] = []
        for one in filter(None, map(self._gradients.get, own)):
            some.append(list(one))
            if sum(_size(gradient) for _, gradient in some) >= _APPLIED:
                self._put("gradients", [number, settings, some])
                some = []
        self._put("gradients", [number, settings, some])

    def _bytes(self, parameter: torch.nn.Parameter) -> int:
        kept = [one for _, values in self._states(parameter) for one in values.values() if _is_tensor(one)]
        return sum(map(_size, (parameter, *kept)))

    def _states(self, parameter: torch.nn.Parameter) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, one in enumerate(self._training.optimizers):
            if parameter in one.state:
                yield number, one.state[parameter]

    def _next_part(self) -> Iterator[list[Any]]:
        """Parameters that the newcomer lacks: their number, value, and what the optimizers keep, with its device."""
        size = 0
        while self._lacks and size < self._part:
            number, one = self._lacks.popleft()
            size += self._bytes(one)
            self._has.append((number, one))
            states = [
                [at, {name: [value, _is_on_gpu(value)] for name, value in values.items()}]
                for at, values in self._states(one)
            ]
            yield _copied([number, one, states])

    def _put(self, kind: str, value: Any) -> None:
        described, tensors = tree.take_apart(value)
        with self._moved:
            self._queue.append(({kind: described, "lacks": len(self._lacks)}, tensors))
            self._moved.notify_all()

    def _send(self) -> None:
        with self._connection:
            try:
                while not self.over:
                    self._send_next()
            except OSError:
                self.end()

    def _send_next(self) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self._queue or self.over, self._timeout / 4)
            # Without anything to send: a sign of life.
            described, tensors = self._queue[0] if self._queue else ({}, [])
            behind = max(0, self._steps_waiting() - 1)
        if "state" in described:
            self._send_rest(described, tensors)
            return
        send(self._connection, {"dict": [["behind", behind], *map(list, described.items())]}, tensors)
        with self._moved:
            if described and self._queue:
                self._queue.popleft()
            self._moved.notify_all()

    def _send_rest(self, described: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        """Compares all tensors with the newcomer's, and sends those that differ."""
        send(self._connection, {"dict": [*map(list, described.items()), ["bits", self._bits.result()]]}, [])
        value = [tensors[at] for at in receive(self._connection)["lacks"]]
        rest = tree.take_apart({"rest": value})
        if self._versions != [one._version for one in tensors]:
            raise ConnectionAbortedError("the state has changed meanwhile")
        send(self._connection, *rest)
        with self._moved:
            self.over = True


class Feeds:
    """The newcomers that this rank feeds."""

    def __init__(self, training: Progress, timeout: float) -> None:
        """timeout: seconds that the next piece of what is sent may take."""
        self._training, self._timeout = training, timeout
        self._can_heal = can_heal(training)
        self._token = secrets.token_bytes(_TOKEN)
        self._listener: socket.socket | None = None
        self._came: collections.deque[tuple[socket.socket, int]] = collections.deque()
        self._feeds: list[_Feed] = []

    def offer(self, place: dict[str, Any], word: int) -> None:
        """Has newcomers find this rank, in a round's group. word: which session this is."""
        if not (self._can_heal and worker.available() and place.get("master_addr")):
            return
        try:
            if self._listener is None:
                with socket.create_connection((place["master_addr"], place["master_port"]), _GREETING) as way:
                    family, host = way.family, way.getsockname()[0]
                self._listener = socket.create_server((host, 0), family=family)
                threading.Thread(target=self._listen, name="elastic-session-feeds", daemon=True).start()
            told = json.dumps([*self._listener.getsockname()[:2], self._token.hex(), word])
        except OSError:
            return
        threading.Thread(target=_tell, args=(place, told), name="elastic-session-tells", daemon=True).start()

    def before_step(self) -> None:
        """The gradients of a step are there, and the step will be applied."""
        while self._came:
            self._feeds.append(_Feed(*self._came.popleft(), self._training, self._timeout))
        for one in self._feeds:
            one.tries(one.before_step)

    def after_step(self) -> None:
        """The step is applied."""
        for one in self._feeds:
            one.after_step()
        if self._feeds:
            self._feeds = [one for one in self._feeds if not one.over]

    def numbers(self) -> list[int]:
        """Those of the newcomers that may have their places."""
        return [one.number for one in self._feeds if one.can_end]

    def end_with_rest(self, numbers: Collection[int]) -> None:
        """The newcomers of these numbers have their places in this rank's group."""
        for one in self._feeds:
            if one.number in numbers:
                one.tries(one.end_with_rest)

    def close(self) -> None:
        """Ends all feeds."""
        for one in self._feeds:
            one.end()
        self._feeds.clear()
        if self._listener is not None:
            shut_down(self._listener)

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                self._listener.close()
                return
            try:
                connection.settimeout(_GREETING)
                greeting = torch.empty(_TOKEN + NUMBER.size, dtype=torch.uint8)
                fill(connection, greeting)
                token, number = bytes(_memory(greeting))[:_TOKEN], bytes(_memory(greeting))[_TOKEN:]
                if not hmac.compare_digest(token, self._token):
                    raise PermissionError("this is no worker of the job")
                if len(self._feeds) + len(self._came) >= _NEWCOMERS:
                    raise BlockingIOError("others are fed already")
                self._came.append((connection, *NUMBER.unpack(number)))
            except OSError:
                connection.close()


def _tell(place: dict[str, Any], told: str) -> None:
    try:
        store = Store(place)
        store.set(f"feed/{store.add('feeds', 1)}", told)
    except RuntimeError:
        pass  # Newcomers get the state in their round.


def _copied(value: Any) -> Any:
    description, tensors = tree.take_apart(value)
    return tree.put_together(description, [one.to("cpu", copy=True) for one in tensors])


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_on_gpu(value: Any) -> bool:
    return _is_tensor(value) and value.device.type != "cpu"


def _has_ended(connection: socket.socket) -> bool:
    """Whether the newcomer has closed its end."""
    try:
        ends = select.poll()
        ends.register(connection, select.POLLRDHUP)
        return bool(ends.poll(0))
    except ValueError:
        return True


def shut_down(one: socket.socket) -> None:
    """Ends a connection, or what listens, also for a thread that waits there."""
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # The other end has closed it.
