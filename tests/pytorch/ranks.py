"""Ranks that are processes of one test, without agents. What an agent says is simulated here: a round forms whenever
a rank asks for one."""

import os
import sys
import time
import traceback

import torch

from elastic_agent import worker

# The first optimizer imports for seconds. The processes of a test have it from this one.
torch.optim.SGD([torch.zeros(1, requires_grad=True)])


class Agent:
    """What a rank hears from its agent."""

    def __init__(self, port: int, rank: int, nodes: int, local: int, first_round: int = 1) -> None:
        group = {"group_rank": rank // local, "group_world_size": nodes}
        address = {"master_addr": "127.0.0.1", "master_port": port}
        self.place = {"rank": rank, "world_size": nodes * local, "round": first_round, **group, **address}
        for name in ("ready", "quiesce", "request_round", "forms_within", "available", "steps_done"):
            setattr(worker, name, getattr(self, name))
        worker.forming = lambda: None
        worker.on_round_change = worker.report_progress = worker.training_is_over = lambda *_, **__: None

    def available(self):
        return True

    def ready(self):
        return self.place

    def request_round(self, reason):
        pass

    def steps_done(self):
        return 0

    def forms_within(self, seconds):
        time.sleep(min(seconds, 0.01))
        return False

    def quiesce(self, step):
        self.place = {**self.place, "round": self.place["round"] + 1}
        return self.place


def alone():
    """After this there is no agent, and no other rank."""
    os.environ["WORLD_SIZE"], worker.available = "1", lambda: False


def refused(complaint, call, kind=ValueError):
    """Sees that a call is refused with this complaint."""
    try:
        call()
    except kind as error:
        assert complaint in str(error), error
    else:
        raise AssertionError(f"{complaint!r} was not refused")


def run(count, rank, seconds=40):
    """Calls `rank` with each number below `count`, in a process of its own. The test fails if one fails or hangs."""
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            try:
                rank(number)
            except BaseException:
                print(f"rank {number}:", file=sys.stderr)
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    # None may wait for the others for ever.
    left, failed, until = set(children), 0, time.monotonic() + seconds
    while left and not failed and time.monotonic() < until:
        for child in list(left):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                left.remove(child)
                failed += status != 0
        time.sleep(0.01)
    for child in left:
        os.kill(child, 9)
    if failed or left:
        sys.exit(f"{failed} failed, {len(left)} did not end")
