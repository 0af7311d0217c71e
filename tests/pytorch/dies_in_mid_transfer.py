"""A rank is killed in the midst of what it sends to another, which gloo then does not tell. The other ranks get out of it
at once all the same, and can meet again."""

import os
import signal
import sys
import threading
import time

import torch

import ranks
from elastic_agent.torch.group import Group, GroupLost

RANKS, BYTES = 3, 256 << 20


def kill_when_some_came(pid, tensor):
    """Kills a process when the first of its numbers are here: the others are on their way then, for long."""
    while tensor[0] == 1:
        pass
    os.kill(pid, signal.SIGKILL)


def loses_one(port, number, round_, operation):
    """Whether this rank, which lives, hears of the end in time."""
    place = {"rank": number, "world_size": RANKS, "round": round_, "master_addr": "127.0.0.1", "master_port": port}
    group = Group(place)
    group.join(timeout=30, outdated=lambda: False)
    tensor = torch.full((BYTES,), 1 if number == 0 else 2, dtype=torch.uint8)
    pids = group.gather(os.getpid())
    if number == 0:
        threading.Thread(target=kill_when_some_came, args=(pids[-1], tensor), daemon=True).start()
    began = time.monotonic()
    try:
        group.finish(operation(group, tensor))
    except GroupLost:
        pass
    took = time.monotonic() - began
    group.close()
    return took, time.monotonic() - began - took


def sends(group, tensor):
    if group.rank == RANKS - 1:
        return group.start_send(tensor, 0, 7)
    return group.start_receive(tensor, RANKS - 1, 7) if group.rank == 0 else None


def rank(port, number):
    torch.set_num_threads(1)
    for round_, operation in enumerate([lambda group, tensor: group.start_sum(tensor), sends]):
        pid = os.fork()
        if pid == 0:
            took, left = loses_one(port, number, round_, operation)
            assert took < 5 and left < 1, (took, left)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        expected = signal.SIGKILL if number == RANKS - 1 else 0
        assert status == expected, (number, round_, status)


if __name__ == "__main__":
    ranks.run(RANKS, lambda number: rank(int(sys.argv[1]), number))
