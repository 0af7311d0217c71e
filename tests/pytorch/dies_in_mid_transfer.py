"""A rank is killed, or stops, while it sends data to another rank: gloo does not report that. The other ranks leave the
operation at once all the same, whatever else is under way in their group, and can meet again."""

import os
import signal
import sys
import threading
import time

import torch

import ranks
from elastic_agent.torch.group import Group, GroupLost

RANKS, BYTES = 3, 256 << 20
# The rank that sends.
VICTIM = RANKS - 1


def stop_when_some_came(pid, tensor, dies):
    """Stops a process when its first numbers are here, and so in the middle of what it sends; then kills it if it is to
    die."""
    while tensor[0] == 1:
        pass
    os.kill(pid, signal.SIGSTOP)
    if dies:
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)


def finishes(start):
    return lambda group, tensor: group.finish(start(group, tensor))


def sends(group, tensor):
    if group.rank == VICTIM:
        return group.start_send([tensor], 0)
    return group.start_receive([tensor], VICTIM) if group.rank == 0 else None


def sums_in_flight(group, tensor):
    """The victim does not begin the sums. gloo ends these with an error, and not the broadcast, which began before."""
    first = group.start_broadcast(tensor, VICTIM)
    later = [group.start_sum(torch.ones(1)) for _ in range(4) if group.rank != VICTIM]
    for work in [*later, first]:
        group.finish(work)


def leaves_all(group, tensor):
    """The victim only stops. The others leave the group with all under way, as when the agent announces a round."""
    works = [group.start_broadcast(tensor, VICTIM), *(group.start_sum(torch.ones(1)) for _ in range(4))]
    if group.rank == VICTIM:
        group.finish(works[0])
    time.sleep(1)
    raise GroupLost("a round is forming")


CASES = [
    finishes(lambda group, tensor: group.start_sum(tensor)),
    finishes(sends),
    sums_in_flight,
    leaves_all,
]


def loses_one(port, number, round_, operation):
    """How long this rank, which lives, takes to hear of the end, and to leave the group."""
    place = {"rank": number, "world_size": RANKS, "round": round_, "master_addr": "127.0.0.1", "master_port": port}
    group = Group(place)
    group.join(timeout=15, outdated=lambda: False)
    tensor = torch.full((BYTES,), 1 if number == 0 else 2, dtype=torch.uint8)
    pids = group.gather(os.getpid())
    if number == 0:
        arguments = pids[VICTIM], tensor, operation is not leaves_all
        threading.Thread(target=stop_when_some_came, args=arguments, daemon=True).start()
    began = time.monotonic()
    try:
        operation(group, tensor)
    except GroupLost:
        pass
    took = time.monotonic() - began
    # Another thread cuts the group as soon as it leaves: neither may wait for the other.
    other = threading.Thread(target=group.cut)
    threading.Timer(0.05, other.start).start()
    group.close()
    left = time.monotonic() - began - took
    time.sleep(0.1)
    other.join()
    if number == 0 and operation is leaves_all:
        os.kill(pids[VICTIM], signal.SIGKILL)
    return took, left, time.monotonic() - began - took


def rank(port, number):
    torch.set_num_threads(1)
    for round_, operation in enumerate(CASES):
        pid = os.fork()
        if pid == 0:
            took, left, both = loses_one(port, number, round_, operation)
            print(f"rank {number}, case {round_}: heard after {took:.2f} s, left after {left:.2f} s", flush=True)
            assert took < 5 and left < 1 and both < 2, (round_, took, left, both)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        expected = signal.SIGKILL if number == VICTIM else 0
        assert status == expected, (number, round_, status)


if __name__ == "__main__":
    ranks.run(RANKS, lambda number: rank(int(sys.argv[1]), number), seconds=80)
