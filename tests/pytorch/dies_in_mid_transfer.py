"""A rank is killed in the midst of what it sends to another, which gloo then does not tell. The other ranks get out of it
at once all the same, and can meet again."""

import os
import signal
import sys
import time

import torch

import ranks
from elastic_agent.torch.group import Group, GroupLost

RANKS, BYTES = 3, 256 << 20


def killed_soon():
    """Kills this process while its numbers are on their way: half of them need more time than this."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(0.03)
        os.kill(parent, signal.SIGKILL)
        os._exit(0)


def loses_one(port, number, round_, operation):
    """Whether this rank, which lives, hears of the end in time."""
    place = {"rank": number, "world_size": RANKS, "round": round_, "master_addr": "127.0.0.1", "master_port": port}
    group = Group(place)
    group.join(timeout=30, outdated=lambda: False)
    tensor = torch.ones(BYTES, dtype=torch.uint8)
    group.gather(number)
    if number == RANKS - 1:
        killed_soon()
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
