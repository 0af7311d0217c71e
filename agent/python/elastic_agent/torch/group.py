"""The ranks of one round: sums and copies between them, over gloo and NCCL, and a way out of both when a peer is gone."""

from __future__ import annotations

import collections
import datetime
import json
import math
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from . import sockets
from .nccl import Communicator, Nccl, Sum
from .nccl_library import NcclError
from .operations import Collective, Lane, Passage, free_later
from .pulse import SLOW, Pulse
from .store import Store

# Seconds between two looks at whether all ranks are there: at first, and after a while.
_LOOK, _LAZY_LOOK = 0.002, 0.05

# Seconds for what a peer had sent before its connection ended to arrive.
_ARRIVES = 0.3

# How long ranks that are all there may take to connect.
_MEETING = datetime.timedelta(seconds=5)

# A text is gathered with its length. Bytes that one sum has room for.
_LENGTH, _SHORT = struct.Struct(">Q"), 248

# Seconds after which a rank tells those that wait for it that it is still at work.
_STILL_AT_WORK = 1.0


# The groups of this process in its newest round, by their names.
_met: tuple[int, collections.Counter[str]] = 0, collections.Counter()


class GroupLost(Exception):
    """The group cannot continue: a peer is gone, or a round is forming. The next round brings another group."""


class Group:
    """The ranks of one round.

    Every operation either completes or raises GroupLost. The group is then useless, also to the other ranks: `cut` has
    closed its connections, so that they do not wait for this rank.

    It is not torch.distributed's default group, whose global state a failed start leaves incomplete
    (`_world.group_count` stays at 1, and such ranks never meet the others again).
    """

    def __init__(self, place: dict[str, Any]) -> None:
        """place: what `elastic_agent.assignment` returns. With a name in `among`, the group is some ranks of the
        round."""
        self.rank, self.size, self.round = place["rank"], place["world_size"], place["round"]
        self._place = place
        self._lock = threading.Lock()
        self._gloo: Any = None
        self._server: dist.TCPStore | None = None
        self._timeout = _MEETING
        # The operations that nothing has waited for yet. The group owns what gloo has of them.
        self._under_way: set[Collective | Passage] = set()
        self._lost = self._closed = False
        # Where gloo listens here, and where at all ranks; and its connections. None while there are not all.
        self._listens: tuple[list[str], list[str]] = [], []
        self._joined: dict[int, int] | None = None
        # For sums of what is on a GPU. Who is there, and who is gone, gloo's connections tell.
        self._nccl: Communicator | None = None
        self._pulse: Pulse | None = None

    def join(self, *, timeout: float, outdated: Callable[[], bool], nccl: Nccl | None = None) -> None:
        """Meets the other ranks. Waits for them, unless `outdated` says that the next round is forming. `timeout`:
        seconds that the next piece of what is sent may then take, or a sum in which a rank gives no sign of life."""
        self._timeout = datetime.timedelta(seconds=timeout)
        if self.size == 1:
            return
        try:
            # The agent serves the store, unless a setting leaves that to the workers.
            if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "True") != "True":
                address, port = self._place["master_addr"], self._place["master_port"]
                self._server = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
            # Nothing can interrupt gloo while it waits for others: it begins when all are there.
            place = _once_more(self._place)
            self._connect(meet(place, self.size, outdated), outdated)
            self._pulse = Pulse(lambda: Store(place), self.rank, self.size, timeout)
            communicator = nccl.connect(self, timeout=timeout, outdated=outdated) if nccl else None
            with self._lock:
                self._nccl = communicator
                if communicator and self._lost:
                    communicator.give_up()
        except RuntimeError as error:
            mistake = self._is_mistake(error) and not outdated()
            self.cut()
            if mistake:
                raise
            raise GroupLost(f"the ranks of round {self.round} could not meet: {error}") from error

    def _connect(self, store: Any, outdated: Callable[[], bool]) -> None:
        """Connects to all ranks, in a thread that may be abandoned: gloo waits half a minute for the connection of a peer
        that has just gone, and there is no socket yet that could be cut."""
        done, errors = threading.Event(), []

        def connect() -> None:
            gloo = None
            try:
                gloo = self._gloo_over(store)
                # Before that, this gives up itself whom it waits for.
                gloo.set_timeout(2 * SLOW * self._timeout)
                with self._lock:
                    if not self._lost:
                        self._gloo, self._joined = gloo, sockets.connections(*self._listens)
            except (RuntimeError, OSError) as error:
                if not self._lost:
                    errors.append(error)
            # No name here may keep the connections.
            gloo = None
            done.set()

        threading.Thread(target=connect, name="elastic-session-connect", daemon=True).start()
        while not done.wait(_LAZY_LOOK):
            if outdated() or self._lost:
                self.cut()
                break
        if errors:
            # Without a name: an exception in its own frame keeps the sockets until garbage is collected.
            raise errors.pop()
        if self._lost:
            raise GroupLost("the next round is forming")

    def _gloo_over(self, store: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices, own = sockets.devices()
        options._threads, options._timeout = 2 * len(options._devices), _MEETING
        store.set(f"listens/{self.rank}", json.dumps(own))
        told = store.multi_get([f"listens/{rank}" for rank in range(self.size)])
        # What is cut from now on is gloo's.
        self._listens = own, [address for one in told for address in json.loads(one)]
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def start_sum(self, tensor: torch.Tensor) -> Any:
        """Begins to sum `tensor` over the ranks, in place. `finish` takes what this returns, and waits."""
        if self.size == 1:
            return None
        if self._nccl and self._nccl.takes(tensor):
            return self._try(lambda: self._nccl.start_sum(tensor))
        return self._start(lambda: Collective(self._gloo.allreduce([tensor])))

    def start_send(self, tensors: Iterable[torch.Tensor], *ranks: int) -> Any:
        """Begins to send tensors to ranks, which receive them in the order in which they are sent. To several ranks it
        sends a list."""
        gloo = self._gloo
        lanes = [Lane(lambda piece, rank=rank: gloo.send([piece], rank, 0), tensors) for rank in ranks]
        return self._start(lambda: Passage(lanes, self._timeout))

    def start_receive(self, tensors: Iterable[torch.Tensor], rank: int) -> Any:
        """Begins to fill tensors with what `rank` sends. The sizes are those that it sends."""
        return self.start_receives({rank: tensors})

    def start_receives(self, tensors: Mapping[int, Iterable[torch.Tensor]]) -> Any:
        """As `start_receive`, from several ranks."""
        gloo = self._gloo
        lanes = [Lane(lambda piece, rank=rank: gloo.recv([piece], rank, 0), some) for rank, some in tensors.items()]
        return self._start(lambda: Passage(lanes, self._timeout))

    def start_broadcast(self, tensor: torch.Tensor, rank: int) -> Any:
        """Begins to fill `tensor` on all ranks with what `rank` has."""
        if self.size == 1:
            return None
        return self._start(lambda: Collective(self._gloo.broadcast(tensor, rank)))

    def finish(self, work: Any) -> None:
        """Waits until an operation is complete."""
        if isinstance(work, Sum):
            self._try(lambda: self._nccl.finish(work))
        elif work is not None:
            self._try(lambda: self._wait_for(work))
            self._under_way.discard(work)

    def finish_with_all(self, works: Iterable[Any]) -> None:
        """Waits until operations are complete, these and those of all other ranks. Who has none left hears now and then
        that the others are still at work: only what does not move ends the group."""
        left = collections.deque(works)
        while True:
            until = time.monotonic() + min(_STILL_AT_WORK, self._timeout.total_seconds() / 4)
            while left and self._try(lambda: self._wait_for(left[0], until)):
                self._under_way.discard(left.popleft())
            if not any(self.gather(len(left))):
                return

    def _start(self, operation: Callable[[], Collective | Passage]) -> Collective | Passage:
        work = self._try(operation)
        self._under_way.add(work)
        return work

    def _wait_for(self, work: Collective | Passage, until: float = math.inf) -> bool:
        """Returns whether it has ended by `until`.

        gloo ends an operation whose connection has ended, unless that operation was receiving or sending there
        (`Pair::signalException` in its tcp/pair.cc skips these). Then only the timeout ends it, and this does not
        wait."""
        ended, began, silent = None, time.monotonic(), None
        while not work.ends_within(_LAZY_LOOK):
            if ended is None and self.has_lost_a_peer():
                ended = time.monotonic()
            if self._lost or (ended is not None and time.monotonic() >= ended + _ARRIVES):
                break
            if time.monotonic() >= until:
                return False
            if self._pulse and isinstance(work, Collective):
                silent = self._pulse.gives_up(time.monotonic() - began)
                if silent:
                    break
        else:
            return True
        self.cut()
        if silent or not work.ends_within(_LAZY_LOOK):
            raise GroupLost(silent or "a connection has ended in the midst of an operation")
        return True

    def gather(self, number: int) -> list[int]:
        """Every rank's number, in the order of ranks."""
        numbers = torch.zeros(self.size, dtype=torch.int64)
        numbers[self.rank] = number
        self.finish(self.start_sum(numbers))
        return [int(one) for one in numbers]

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in the order of ranks. Where one is long this takes two sums."""
        own = text.encode()
        rows = self._gather_rows(_LENGTH.pack(len(own)) + own[:_SHORT], _LENGTH.size + _SHORT)
        lengths = [_LENGTH.unpack_from(row)[0] for row in rows]
        rows = [row[_LENGTH.size :] for row in rows]
        if max(lengths) > _SHORT:
            rows = self._gather_rows(own, max(lengths))
        return [row[:length].decode() for row, length in zip(rows, lengths)]

    def _gather_rows(self, own: bytes, length: int) -> list[bytes]:
        """Every rank's bytes, followed by zeros up to `length`."""
        every = torch.zeros(self.size, length, dtype=torch.uint8)
        every[self.rank, : len(own)] = torch.tensor(list(own), dtype=torch.uint8)
        self.finish(self.start_sum(every))
        return [bytes(row.tolist()) for row in every]

    def has_lost_a_peer(self) -> bool:
        """Whether a connection to another rank has ended."""
        if self._joined is None:
            return False
        ends = select.poll()
        for inode, fd in self._joined.items():
            try:
                if os.fstat(fd).st_ino != inode:
                    return True  # gloo has closed it.
            except OSError:
                return True
            ends.register(fd, select.POLLRDHUP)
        return bool(ends.poll(0))

    def cut(self) -> None:
        """Ends what is under way here and at the peers, at once and from any thread. gloo's `abort` does not stop a
        thread that waits for a silent peer; but every wait on a connection that is shut down fails."""
        with self._lock:
            self._lost = True
            if self._nccl:
                self._nccl.give_up()
            if self.size > 1 and not self._closed:
                joined = sockets.connections(*self._listens) if self._joined is None else self._joined
                for inode, fd in joined.items():
                    sockets.shut_down(fd, inode)

    def close(self) -> None:
        """Leaves the group, and never waits for gloo: what has operations under way is freed later. NCCL's end is
        waited for, up to its limit."""
        self.cut()
        if self._pulse:
            self._pulse.end()
        if self._nccl:
            self._nccl.close()
        with self._lock:
            held, self._gloo, self._server, self._closed = [self._gloo], None, None, True
        held += [one.give_up() for one in self._under_way]
        if not all(one.over for one in self._under_way):
            free_later(held)
        self._under_way.clear()

    def _try(self, operation: Callable[[], Any]) -> Any:
        if self._lost:
            raise GroupLost("the group was left")
        try:
            return operation()
        except RuntimeError as error:
            mistake = self._is_mistake(error)
            self.cut()
            if mistake:
                raise
            raise GroupLost(str(error).splitlines()[0]) from error

    def _is_mistake(self, error: RuntimeError) -> bool:
        """Whether no connection has failed: then every next group would meet the error again, as where gloo cannot add
        numbers of that type."""
        known = isinstance(error, (NcclError, dist.DistError)) or "gloo" in str(error).lower()
        return not (self._lost or known or self.has_lost_a_peer())


def _once_more(place: dict[str, Any]) -> dict[str, Any]:
    """The place with a name for this meeting: the next session of a script meets the ranks of its round a second time,
    and must not find what the first one left in the store."""
    global _met
    if _met[0] != place["round"]:
        _met = place["round"], collections.Counter()
    among = place.get("among", "")
    _met[1][among] += 1
    return {**place, "among": f"{among} {_met[1][among]}"}


def meet(place: dict[str, Any], size: int, outdated: Callable[[], bool]) -> Store:
    """Waits until all `size` ranks of a round, with the same name in `among`, have called this. Returns a store of their
    own. Raises GroupLost when `outdated` says that the next round is forming."""
    store, pause = Store(place), _LOOK
    store.add("here", 1)
    while store.add("here", 0) < size:
        if outdated():
            raise GroupLost("the next round is forming")
        time.sleep(pause)
        pause = min(1.1 * pause, _LAZY_LOOK)
    return store
