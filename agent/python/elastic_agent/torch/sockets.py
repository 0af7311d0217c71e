"""gloo's connections, which it does not name: the addresses on which it listens, here and at the other ranks, tell them
from the script's own."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist

# How often a device is made while other threads begin to listen at the same moment. Each takes about a millisecond.
_TRIES = 1000


def devices() -> tuple[list[Any], list[str]]:
    """gloo's devices, as PyTorch chooses them, and the addresses on which they listen."""
    names = list(filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")))
    gloo = dist.ProcessGroupGloo
    makers = [functools.partial(gloo.create_device, interface=name) for name in names] or [gloo.create_default_device]
    made = list(map(_device, makers))
    return [device for device, _ in made], [address for _, listens in made for address in listens]


def _device(make: Callable[[], Any]) -> tuple[Any, list[str]]:
    """A device, and where it listens."""
    for _ in range(_TRIES):
        before = _sockets()
        device = make()
        later = [_ends(fd) for inode, fd in _sockets().items() if inode not in before]
        listens = [here for here, there in filter(None, later) if there is None]
        if len(listens) == 1:
            return device, listens
    raise RuntimeError(f"threads of the script began to listen {_TRIES} times at the moment in which gloo did")


def connections(listening: Collection[str], at_peers: Collection[str]) -> dict[int, int]:
    """The connections to these addresses, of this process and of others: the number of each inode, and a descriptor."""
    found = {}
    for inode, fd in _sockets().items():
        here, there = _ends(fd) or ("", None)
        if there is not None and (here in listening or there in at_peers):
            found[inode] = fd
    return found


def shut_down(fd: int, inode: int) -> None:
    """Shuts down a connection, if the descriptor is still that socket. A duplicate keeps its identity meanwhile."""
    try:
        own = os.dup(fd)
    except OSError:
        return
    if os.fstat(own).st_ino != inode:
        os.close(own)
        return
    with socket.socket(fileno=own) as connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The peer has closed it.


def _sockets() -> dict[int, int]:
    """This process's sockets: the number of each inode, and a descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if link.startswith("socket:["):
            found[int(link[len("socket:[") : -1])] = int(name)
    return found


def _ends(fd: int) -> tuple[str, str | None] | None:
    """The addresses of a connection, here and there; there is None of a socket that listens. None for other sockets."""
    try:
        with socket.socket(fileno=os.dup(fd)) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                return None
            listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return _text(one.getsockname()), None if listens else _text(one.getpeername())
    except OSError:
        return None  # It is closed, or not connected.


def _text(address: tuple[Any, ...]) -> str:
    # A host's name for its interface, after `%`, is no other host's.
    return f"{address[0].partition('%')[0]} {address[1]}"
