"""Operations of gloo that are under way: each can be waited for a while, and be given up without a wait."""

from __future__ import annotations

import collections
import datetime
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

# Bytes of what goes from one rank to another at once, and how many of these are under way.
_PIECE, _WINDOW = 4 << 20, 16


class Collective:
    """A sum or a broadcast. `over` becomes true when it has ended, well or not."""

    def __init__(self, work: Any) -> None:
        self._work, self.over = work, False

    def ends_within(self, seconds: float) -> bool:
        """Waits for its end, up to `seconds`. Returns whether it ended. Raises RuntimeError if it failed."""
        try:
            self._work.wait(datetime.timedelta(seconds=seconds))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self.over = True
            # It may have ended well since.
            self._work.wait()
        self.over = True
        return True

    def give_up(self) -> Any:
        """Hands over gloo's part. To free it may wait for the end of the operation."""
        self.over = self.over or self._work.is_completed()
        work, self._work = self._work, None
        return work


class Lane:
    """Tensors on their way between this rank and another one, in pieces of a few megabytes."""

    def __init__(self, operation: Callable[[torch.Tensor], Any], tensors: Iterable[torch.Tensor]) -> None:
        """operation: begins to send or to receive one piece."""
        self._operation, self._pieces = operation, _pieces(tensors)
        self._under_way: collections.deque[Any] = collections.deque()

    def moves(self, timeout: datetime.timedelta, *, begins: bool) -> bool:
        """Begins the next piece, if it may. With no room for more, waits for the oldest. Returns whether any is left."""
        piece = next(self._pieces, None) if begins else None
        if piece is not None:
            self._under_way.append(self._operation(piece))
        if self._under_way and (piece is None or len(self._under_way) == _WINDOW):
            self._under_way.popleft().wait(timeout)
        return piece is not None or bool(self._under_way)


class Passage:
    """What goes from one rank to others, or from others to one. A wait with a timeout that is over ends all other
    operations of the group: so a thread waits, one for all lanes, and owns gloo's part. Each piece may take `timeout`
    seconds after the one before it."""

    def __init__(self, lanes: list[Lane], timeout: datetime.timedelta) -> None:
        self._ended, self._given_up, self._error = threading.Event(), False, ""
        arguments = collections.deque(lanes), timeout
        # This frame must not keep the connections.
        lanes.clear()
        threading.Thread(target=self._pass, args=arguments, name="elastic-session-passage", daemon=True).start()

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def _pass(self, lanes: collections.deque[Lane], timeout: datetime.timedelta) -> None:
        try:
            while lanes:
                if lanes[0].moves(timeout, begins=not self._given_up):
                    lanes.rotate(-1)
                else:
                    lanes.popleft()
        except Exception as error:  # noqa: BLE001: who waits hears of it, whatever it is.
            # Not the error itself: its frames would keep the connections.
            self._error = str(error) or repr(error)
        lanes.clear()
        self._ended.set()

    def ends_within(self, seconds: float) -> bool:
        """Waits for its end, up to `seconds`. Returns whether it ended. Raises RuntimeError if it failed."""
        if self._ended.wait(seconds) and self._error:
            raise RuntimeError(self._error)
        return self._ended.is_set()

    def give_up(self) -> None:
        """Its thread frees gloo's part."""
        self._given_up = True


class Errand:
    """What this rank does by itself, in a thread, while the others wait for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._ended, self._returned, self._error = threading.Event(), None, None
        threading.Thread(target=self._run, args=(call,), name="elastic-session-errand", daemon=True).start()

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._returned = call()
        except Exception as error:  # noqa: BLE001: `result` raises it.
            self._error = error
        self._ended.set()

    def ends_within(self, seconds: float) -> bool:
        """Waits for its end, up to `seconds`. Returns whether it ended."""
        return self._ended.wait(seconds)

    def give_up(self) -> None:
        """It ends by itself."""

    def result(self) -> Any:
        """Waits for its end. Returns what it returned, or raises what it raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._returned


def _pieces(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        if tensor.numel():
            yield from tensor.reshape(-1).split(max(1, _PIECE // tensor.element_size()))


def free_later(held: list[Any]) -> None:
    """Frees what a list holds, in a thread of its own: gloo waits for all operations under way until their timeout. The
    caller keeps no other reference to it."""
    threading.Thread(target=held.clear, name="elastic-session-free", daemon=True).start()
