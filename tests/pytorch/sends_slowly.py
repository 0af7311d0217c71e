"""Operations between ranks that take longer than the limit of one: a peer that begins late, and a transfer that is slow
but moves. The group is lost only where nothing has moved for that long. Who lives is waited for, and who is stopped is
not."""

import datetime
import os
import signal
import sys
import time

import torch

import ranks
from elastic_agent.torch import group as groups
from elastic_agent.torch.group import Group, GroupLost

RANKS, PIECES, PAUSE = 3, 8, 0.4
LATE, LIMIT = 2.0, 1.0
processes = torch.zeros(RANKS, dtype=torch.int64).share_memory_()


def joined(port, number, round_, timeout):
    place = {"rank": number, "world_size": RANKS, "round": round_, "master_addr": "127.0.0.1", "master_port": port}
    group = Group(place)
    group.join(timeout=timeout, outdated=lambda: False)
    return group


def slowly(pause):
    for number in range(PIECES):
        time.sleep(pause)
        yield torch.full((1000,), float(number))


def begins_late(port, number):
    """The time in which ranks connect is no limit for what they send."""
    group, got = joined(port, number, 1, 30), torch.zeros(1000)
    if number == 0:
        time.sleep(LATE)
    if number < 2:
        group.finish(group.start_send([torch.ones(1000)], 1) if number == 0 else group.start_receive([got], 0))
    assert number != 1 or got.sum() == 1000
    # Who leaves earlier ends what is under way.
    group.gather(number)
    group.close()


def moves_slowly(port, number):
    """Each piece has a limit of its own; and who is done waits for the others while these work."""
    group, got = joined(port, number, 2, LIMIT), [torch.zeros(1000) for _ in range(PIECES)]
    began = time.monotonic()
    works = []
    if number == 0:
        works = [group.start_send(slowly(PAUSE), 1)]
    elif number == 1:
        works = [group.start_receive(got, 0)]
    group.finish_with_all(works)
    assert time.monotonic() - began > 2 * LIMIT, "it was to take longer than the limit"
    assert number != 1 or [int(one[0]) for one in got] == list(range(PIECES))
    # All of the group is as before.
    assert group.gather(number) == [0, 1, 2]
    group.close()


def no_longer_moves(port, number):
    """Ranks that wait hear of it, whatever they wait for."""
    group, got = joined(port, number, 3, LIMIT), [torch.zeros(1000) for _ in range(PIECES)]
    began = time.monotonic()
    works = [group.start_send(slowly(2.5 * LIMIT), 1)] if number == 0 else []
    works += [group.start_receive(got, 0)] if number == 1 else []
    try:
        group.finish_with_all(works)
    except GroupLost:
        assert time.monotonic() - began < 5 * LIMIT
        group.close()
        return
    raise AssertionError("what stops for longer than the limit is given up")


def is_busy_or_stopped(port, number):
    """In a sum others see whether a rank does something else, or is stopped."""
    group = joined(port, number, 4, LIMIT)
    processes[number] = os.getpid()
    if number == 2:
        time.sleep(3 * LIMIT)
    assert group.gather(number) == [0, 1, 2]
    if number == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    try:
        group.gather(number)
    except GroupLost as lost:
        if number == 0:
            os.kill(int(processes[2]), signal.SIGCONT)
        assert number == 2 or LIMIT < time.monotonic() - began < 5 * LIMIT
        # The other may have heard of it from the first.
        assert number > 0 or "rank 2 has given no sign of life" in str(lost) or "connection" in str(lost), lost
        group.close()
        return
    raise AssertionError("a rank that is stopped is given up")


def rank(port, number):
    torch.set_num_threads(1)
    groups._MEETING = datetime.timedelta(seconds=LATE / 2)
    for case in (begins_late, moves_slowly, no_longer_moves, is_busy_or_stopped):
        case(port, number)


if __name__ == "__main__":
    ranks.run(RANKS, lambda number: rank(int(sys.argv[1]), number))
