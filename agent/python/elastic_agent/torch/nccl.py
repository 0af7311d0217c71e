"""Sums over the ranks of a round by NCCL, on GPUs, which can be given up at any time.

    start_sum ──▶ the thread that calls NCCL ──▶ the stream ──▶ finish
                    │ a peer is gone, NCCL fails, the group is cut
                    ▼
                  aborted: what is under way ends, on the device too
"""

from __future__ import annotations

import atexit
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .keeper import say
from .nccl_library import ID_BYTES, Library, NcclError, takes

# Seconds between two checks of the operations under way: while a thread waits for them, and while none does.
_LOOK, _LAZY_LOOK = 0.0001, 0.005
# Seconds between two looks at the peers' connections.
_LOOK_AROUND = 0.005
# Seconds that the device may take until it is out of the buffers of an operation that was aborted.
_CALM = 10.0
# Seconds that the end of this process waits for aborts.
_PART = 5.0
# After so many failures without a sum between them, which no peer's end explains, a process does without NCCL.
_FAILURES = 2

# How long after an error of NCCL's to look for a peer's end, which explains it.
_NAMING = 0.5

# Aborts that have begun.
_parting: list[threading.Thread] = []
# Where NCCL has written its communicators.
_places: list[ctypes.c_void_p] = []


class Stream:
    """A stream of the GPU, beside the one on which PyTorch computes."""

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.address = self._stream.cuda_stream

    def bind(self) -> None:
        """Makes the device the calling thread's."""
        torch.cuda.set_device(self._device)

    def now(self) -> Any:
        """A mark behind what the calling thread has given the GPU so far."""
        return torch.cuda.current_stream(self._device).record_event()

    def wait_for(self, mark: Any) -> None:
        """Makes later work on this stream begin after that mark."""
        self._stream.wait_event(mark)

    def mark(self) -> Any:
        """A mark behind what is on this stream."""
        return self._stream.record_event()

    def is_done(self, mark: Any) -> bool:
        """Whether the GPU is past that mark."""
        return mark.query()


class Nccl:
    """Whether this process sums by NCCL, from round to round."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], backend: str | None) -> None:
        """backend: "nccl", "gloo", or None for NCCL where the parameters are on one GPU. Raises ValueError for
        another, or if NCCL is asked for and cannot be used here."""
        if backend not in (None, "nccl", "gloo"):
            raise ValueError(f"backend is 'nccl', 'gloo' or None, and not {backend!r}")
        self._wanted = backend == "nccl"
        self._library: Library | None = None
        self._failures = 0
        self._told: str | None = None
        devices = {parameter.device for parameter in parameters}
        self._device = next(iter(devices)) if len(devices) == 1 else torch.device("meta")
        if backend == "gloo" or (backend is None and self._device.type != Stream.device_type):
            return
        if self._device.type != Stream.device_type:
            where = "on several devices" if len(devices) > 1 else f"on {self._device}"
            raise ValueError(f"backend='nccl' is for a model whose parameters are on one GPU, and they are {where}")
        try:
            self._library = Library()
        except NcclError as error:
            if self._wanted:
                raise ValueError(str(error)) from None
            self._tell(str(error))

    def connect(self, group: Any, *, timeout: float, outdated: Callable[[], bool]) -> Communicator | None:
        """A communicator of the group's ranks, which all call this. If not all can have one, it is None on all, or a
        ValueError if the script requires NCCL."""
        versions = group.gather(self._library.version if self._library and self._failures < _FAILURES else 0)
        if not any(versions) and not self._library:
            return None
        if len(set(versions)) > 1 or not all(versions):
            each = ", ".join(f"{one or 'none that works'} on rank {rank}" for rank, one in enumerate(versions))
            return self._refused(f"the ranks' versions of NCCL, as it counts them, are {each}")
        failure, id_ = None, bytes(ID_BYTES)
        try:
            if group.rank == 0:
                id_ = self._library.new_id()
        except NcclError as error:
            failure = error
        told = torch.tensor(list(id_), dtype=torch.uint8)
        group.finish(group.start_broadcast(told, 0))
        made = Communicator(self._library, Stream(self._device), self._device, group.has_lost_a_peer, timeout)
        try:
            if told.any():
                failure = made.connect((bytes(told.tolist()), group.size, group.rank), outdated)
            failed = [rank for rank, well in enumerate(group.gather(int(failure is None and bool(told.any())))) if not well]
        except BaseException:
            made.give_up()
            raise
        if not failed:
            made.report = self._noted
            return made
        made.give_up()
        if failure is not None:
            self._noted(str(failure))
        ranks = ", ".join(map(str, failed))
        return self._refused(f"NCCL could not connect rank {ranks}" + (f": {failure}" if failure else ""))

    def _noted(self, failure: str | None) -> None:
        """NCCL has failed though no rank is gone; or, without a word, it has summed."""
        if failure is None:
            self._failures = 0
            return
        self._failures += 1
        say(f"NCCL has failed, though no rank is gone: {failure}")

    def _refused(self, why: str) -> None:
        if self._wanted:
            raise ValueError(f"{why}. Without backend='nccl' the ranks use gloo, through the hosts")
        self._tell(why)

    def _tell(self, why: str) -> None:
        if why != self._told:
            say(f"gradients are summed over gloo, through the hosts: {why}")
            self._told = why


class Sum:
    """A sum that has begun."""

    # No later use of the tensor meets the sum: `finish` and `close` wait until the device is out of it.
    over = True

    def __init__(self, tensor: torch.Tensor, after: Any) -> None:
        self.tensor, self.after = tensor, after
        self.mark: Any = None
        self.complete = False
        # Complete, or given up.
        self.ended = threading.Event()


class _GivenUp(Exception):
    """Not a failure of NCCL's: a peer is gone, or the group is cut."""


class Communicator:
    """The ranks of one round. One thread makes every call of NCCL, and none blocks except an abort, which has a thread of
    its own. So a sum can be given up at any time, and what is left of it is never taken for a result."""

    def __init__(
        self, library: Library, stream: Any, device: torch.device, has_lost_a_peer: Callable[[], bool], timeout: float
    ) -> None:
        self._library, self._stream, self._device = library, stream, device
        # The other ranks wait for this one, for as long as an operation of theirs may take.
        self._has_lost_a_peer, self._timeout = has_lost_a_peer, 0.75 * timeout
        # Not a SimpleQueue: CPython 3.11's waits for ever if it is woken without an item after its timeout
        # (`_queuemodule.c` takes the negative time that is left for no timeout).
        self._calls: queue.Queue[Sum | None] = queue.Queue()
        self._under_way: list[Sum] = []
        self._comm: int | None = None
        self._since = self._looked_around = time.monotonic()
        self._given_up, self._waited_for = threading.Event(), threading.Event()
        self._connected, self._ended = threading.Event(), threading.Event()
        self._why, self._device_failed = "the group was left", False
        # Told once that a sum is complete, with None, and why NCCL has failed.
        self.report: Callable[[str | None], None] = lambda failure: None
        self._works = False

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether this can sum it."""
        return tensor.device == self._device and takes(tensor.dtype)

    def connect(self, place: tuple[bytes, int, int], outdated: Callable[[], bool]) -> NcclError | None:
        """Connects to the other ranks: `place` is their id, their number, and this one's rank. Returns why it could not.
        Raises RuntimeError if the next round is forming."""
        threading.Thread(target=self._work, args=place, name="elastic-session-nccl", daemon=True).start()
        while not self._connected.wait(_LAZY_LOOK):
            if outdated():
                raise RuntimeError("the next round is forming")
        return NcclError(self._why) if self._given_up.is_set() else None

    def start_sum(self, tensor: torch.Tensor) -> Sum:
        """Begins to sum `tensor` over the ranks, in place, behind what the calling thread has given the GPU so far."""
        started = Sum(tensor, self._stream.now())
        self._calls.put(started)
        return started

    def finish(self, started: Sum) -> None:
        """Waits until a sum is complete. Raises NcclError if it was given up, RuntimeError if the device has failed."""
        if not self._waited_for.is_set():
            self._waited_for.set()
            self._calls.put(None)
        while not started.ended.wait(_LOOK_AROUND) and not self._ended.is_set():
            pass
        if not started.complete:
            raise (RuntimeError if self._device_failed else NcclError)(self._why)

    def give_up(self) -> None:
        """Ends what is under way. From any thread; does not wait."""
        self._given_up.set()
        self._calls.put(None)

    def close(self) -> None:
        """Waits until the device is out of all buffers."""
        self.give_up()
        if not self._ended.wait(2 * _CALM):
            # Nothing in this process can help, and its buffers may still be written.
            say("NCCL does not come back from a call: this worker ends")
            os._exit(1)

    def _work(self, id_: bytes, size: int, rank: int) -> None:
        try:
            self._stream.bind()
            self._begin(id_, size, rank)
            self._connected.set()
            while not self._given_up.is_set():
                self._next()
                self._look()
        except _GivenUp as why:
            self._why = str(why)
        except RuntimeError as error:
            # NCCL's, or the device's.
            self._why, self._device_failed = str(error), not isinstance(error, NcclError)
            if self._connected.is_set() and not self._explained():
                self.report(str(error))
        finally:
            self._end()

    def _begin(self, id_: bytes, size: int, rank: int) -> None:
        place = ctypes.c_void_p()
        # NCCL may write there after this has given up.
        _places.append(place)
        self._library.init(place, size, id_, rank)
        self._comm = place.value
        self._settle("ncclCommInitRankConfig")

    def _settle(self, doing: str) -> None:
        """Waits until NCCL has taken what it was given."""
        until = time.monotonic() + self._timeout
        while not self._library.check(doing, self._comm):
            if self._given_up.is_set():
                raise _GivenUp(self._why)
            self._look_around()
            if time.monotonic() > until:
                raise NcclError(f"{doing} took longer than {self._timeout:.0f} s, though no rank is gone")
            time.sleep(_LOOK)

    def _next(self) -> None:
        """Puts the next sum on the stream, if one comes soon."""
        soon = 1.0 if not self._under_way else _LOOK if self._waited_for.is_set() else _LAZY_LOOK
        try:
            started = self._calls.get(timeout=soon)
        except queue.Empty:
            return
        if started is None:
            return
        self._under_way.append(started)
        self._stream.wait_for(started.after)
        self._library.sum_up(started.tensor, self._comm, self._stream.address)
        self._settle("ncclAllReduce")
        started.mark = self._stream.mark()

    def _look(self) -> None:
        """Ends the sums that are complete. Raises if there is an error, or a peer is gone."""
        now = time.monotonic()
        while self._under_way and self._stream.is_done(self._under_way[0].mark):
            self._library.check("ncclAllReduce", self._comm)
            done = self._under_way.pop(0)
            done.complete = True
            done.ended.set()
            if not self._works:
                self._works = True
                self.report(None)
            self._since = now
        if not self._under_way:
            self._waited_for.clear()
        if not self._waited_for.is_set():
            self._since = now
        if now - self._since > self._timeout:
            raise NcclError(f"a sum took longer than {self._timeout:.0f} s, though no rank is gone")
        if self._under_way:
            self._look_around()

    def _look_around(self) -> None:
        """Raises if a peer is gone: NCCL itself would wait for it."""
        now = time.monotonic()
        if now - self._looked_around > _LOOK_AROUND:
            self._looked_around = now
            if self._has_lost_a_peer():
                raise _GivenUp("a peer is gone")

    def _explained(self) -> bool:
        """Whether a peer is gone, or the group cut: then an error of NCCL's is no failure of NCCL's."""
        until = time.monotonic() + _NAMING
        while time.monotonic() < until:
            if self._given_up.is_set() or self._has_lost_a_peer():
                return True
            time.sleep(_LAZY_LOOK)
        return False

    def _end(self) -> None:
        """Aborts, and waits until the device is out of the buffers: the abort itself takes up to a second."""
        self._given_up.set()
        if self._comm is not None:
            abort = threading.Thread(
                target=self._library.abort, args=(self._comm,), name="elastic-nccl-abort", daemon=True
            )
            abort.start()
            _parting[:] = [one for one in _parting if one.is_alive()] + [abort]
        until = time.monotonic() + _CALM
        try:
            behind = self._stream.mark()
            while not (calm := self._stream.is_done(behind)) and time.monotonic() < until:
                time.sleep(_LOOK)
        except RuntimeError:
            calm = True  # A device that fails does no more work.
        if calm:
            self._ended.set()
        self._connected.set()


def _wait_for_aborts() -> None:
    """A process that ends in the middle of NCCL's abort may crash."""
    until = time.monotonic() + _PART
    for abort in _parting:
        abort.join(max(0.0, until - time.monotonic()))


atexit.register(_wait_for_aborts)
