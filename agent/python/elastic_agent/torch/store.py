"""A connection to the store where the ranks of a round meet, in the words of PyTorch's TCPStore. PyTorch's own client
asks the name service for the host's name before it connects, for its messages. A lost answer takes it five seconds."""

from __future__ import annotations

import datetime
import socket
import struct
import threading
import time
from typing import Any

import torch.distributed as dist

# What a client says first, and the numbers of its questions.
_HELLO = struct.pack("<BI", 0, 0x3C85F7CE)
_SET, _ADD, _WAIT, _MULTI_GET = (bytes([one]) for one in (1, 4, 6, 10))
# Seconds for an answer, and for a key to have a value if not told otherwise; and between two tries to connect: rank 0 may
# not serve yet.
_ANSWER, _AGAIN = 5.0, 0.05


class Store(dist.Store):
    """Keys and values of the ranks that meet at one place, for gloo, too. Everything here raises a RuntimeError if the
    store does not answer."""

    def __init__(self, place: dict[str, Any]) -> None:
        """place: what `elastic_agent.assignment` returns. Its keys are not those of another round, nor of another name
        in `among`."""
        super().__init__()
        self.set_timeout(datetime.timedelta(seconds=_ANSWER))
        self._name = "/".join(filter(None, ["elastic_agent.torch", str(place["round"]), place.get("among"), ""]))
        self._lock, until = threading.Lock(), time.monotonic() + _ANSWER
        self._connection = None
        while self._connection is None:
            try:
                self._connection = socket.create_connection((place["master_addr"], place["master_port"]), _ANSWER)
            except OSError as error:
                if not isinstance(error, ConnectionError) or time.monotonic() > until:
                    raise dist.DistNetworkError(f"the store of the ranks does not answer: {error}") from error
                time.sleep(_AGAIN)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._connection.makefile("rb")
        self._ask(_HELLO)

    def set(self, key: str, value: str | bytes) -> None:
        """Gives a key a value."""
        self._ask(_SET + self._word(key) + _counted(value if isinstance(value, bytes) else value.encode()))

    def get(self, key: str) -> bytes:
        """The value of a key. Waits until it has one, as `wait` does."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of some keys. Waits until all have one, as `wait` does."""
        self.wait(keys)
        with self._lock:
            self._said(_MULTI_GET + self._words(keys), 0)
            return [self._said(b"", *struct.unpack("<Q", self._said(b"", 8))) for _ in keys]

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, which is 0 at first. Returns the sum."""
        return struct.unpack("<q", self._ask(_ADD + self._word(key) + struct.pack("<q", amount), 8))[0]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Waits until all keys have values, for `timeout` at most, without one as `set_timeout` says; for ever if it is
        0. After an error the connection is of no use."""
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        with self._lock:
            self._connection.settimeout(seconds or None)
            self._said(_WAIT + self._words(keys), 1)
            self._connection.settimeout(_ANSWER)

    def _words(self, keys: list[str]) -> bytes:
        return struct.pack("<Q", len(keys)) + b"".join(map(self._word, keys))

    def _word(self, key: str) -> bytes:
        return _counted((self._name + key).encode())

    def _ask(self, question: bytes, length: int = 0) -> bytes:
        with self._lock:
            return self._said(question, length)

    def _said(self, question: bytes, length: int) -> bytes:
        """What the store answers: so many bytes."""
        try:
            self._connection.sendall(question)
            answer = self._answers.read(length)
        except OSError as error:
            raise dist.DistNetworkError(f"the store of the ranks does not answer: {error}") from error
        if len(answer) < length:
            raise dist.DistNetworkError("the store of the ranks has closed the connection")
        return answer


def _counted(word: bytes) -> bytes:
    return struct.pack("<Q", len(word)) + word
