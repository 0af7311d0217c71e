"""A worker gets the state of two ranks while they train, and then joins them: by AdamW with a scheduler, a clipped
gradient and a GradScaler that leaves a step out. It has the same bits, so nothing but the rest is sent in its round, and
the others compute a step meanwhile, with all its samples. The rank that feeds it dies, the newcomer is too slow, or what
feeds it breaks in its round: then it gets all in a round. What an agent says is simulated."""

import os
import socket
import sys
import threading
import time
import types

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks
from elastic_agent import worker
from elastic_agent.torch import feed, heal
from elastic_agent.torch.group import Group
from elastic_agent.torch.membership import Membership

SAMPLES, BATCH, SKIPPED, MORE, LIMIT = 1200, 12, 6, 8, 30
# Seconds that the rest takes, and that the others compute in that step.
REST, COMPUTES = 2.0, 4.0
torch.set_num_threads(1)
# The steps that are done, whether the newcomer is ready, what each rank has in the end, and its longest step.
done = torch.zeros(1).share_memory_()
ready = torch.zeros(1).share_memory_()
ends = torch.zeros(3, 80).share_memory_()
slowest = torch.zeros(3).share_memory_()
# What each rank waits for in its second round, and how many samples it has in the first step there.
paused = torch.zeros(3).share_memory_()
first = torch.zeros(3).share_memory_()


class Agent(ranks.Agent):
    """Its second round has the newcomer, and not rank 1 if that has died."""

    def __init__(self, port, number, first, lost):
        super().__init__(port, number, 2, 1, first)
        self.second = {"rank": number, "world_size": 3, "round": first + 1}
        self.entered = None
        if lost:
            self.second = {**self.second, "rank": 0 if number == 0 else 1, "world_size": 2}
        worker.forming = self.forming
        self.running = {"round": first, "master_addr": "127.0.0.1", "master_port": port, "left_ms": 60_000}

    def forming(self):
        forms = ready.item() and self.place["round"] < self.second["round"]
        return (self.second["round"], "a node joins") if forms else None

    def forms_within(self, seconds):
        time.sleep(min(seconds, 0.01))
        return self.forming() is not None

    def quiesce(self, step):
        until = time.monotonic() + LIMIT
        while not ready.item() and time.monotonic() < until:
            time.sleep(0.01)
        broken = self.place["round"] >= self.second["round"]
        self.place = {**self.place, **self.second, "round": self.place["round"] + 1 if broken else self.second["round"]}
        self.entered = self.entered or time.monotonic()
        return self.place


def wait_for_step(step):
    until = time.monotonic() + LIMIT
    while done.item() < step and time.monotonic() < until:
        time.sleep(0.01)


def train(number, act=lambda session: None, computes=0.0):
    """Trains until the newcomer has done some steps. computes: seconds of the first step with it."""
    torch.manual_seed(number)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5)
    inputs = torch.linspace(-3, 3, SAMPLES * 4).reshape(SAMPLES, 4).sin()
    dataset = TensorDataset(inputs, torch.arange(SAMPLES) % 2)
    sampler = elastic.ElasticBatchSampler(dataset, BATCH, seed=3, drop_last=True)
    settings = {"scheduler": scheduler, "scaler": scaler, "operation_timeout": 10}
    with elastic.Session(model, optimizer, sampler, **settings) as session:
        begins, together = session.step_number, 0
        for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler), epochs=50):
            began = time.monotonic()
            if agent.entered and not paused[number]:
                paused[number], first[number] = began - agent.entered, session._step.batches[0]
                time.sleep(computes)
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            session.backward(loss * torch.inf if session.step_number % SKIPPED == 3 else loss)
            session.clip(0.5)
            applied = session.step()
            done[0] = session.step_number
            act(session)
            time.sleep(0.02)
            slowest[number] = max(slowest[number].item(), time.monotonic() - began)
            together += applied and agent.place["round"] >= agent.second["round"]
            if together == MORE:
                break
    kept = [one.detach().flatten() for one in (*model.parameters(), *optimizer.state[model[0].weight].values())]
    flat = torch.cat([one.float().flatten() for one in kept])
    ends[number, : len(flat)] = flat
    return begins


class Newcomer:
    """What it has got ahead of its place."""

    def __init__(self):
        self.compared, self.wanted = 0, []
        worker.running_round = self.running_round
        worker.ready = self.ready
        compare = heal.Healing._that_differ

        def compared(healing, tensors, bits):
            assert is_sent_at_once(healing._connection)
            self.compared = sum(one is not None for one in tensors)
            found = compare(healing, tensors, bits)
            self.wanted = [None if tensors[at] is None else tuple(tensors[at].shape) for at in found]
            return found

        heal.Healing._that_differ = compared

    def running_round(self):
        wait_for_step(2)
        return agent.running

    def ready(self):
        wait_for_step(3 * SKIPPED)
        ready[0] = 1
        return agent.quiesce(0)


def is_sent_at_once(connection):
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def counts_sums():
    """How many sums a rank waits for in each group until it knows who gives a state to whom."""
    start, agree, found = Group.start_sum, Membership._agree, []

    def starts(group, tensor):
        group.sums = getattr(group, "sums", 0) + 1
        return start(group, tensor)

    def agrees(members, told):
        value = agree(members, told)
        found.append(members.group.sums)
        return value

    Group.start_sum, Membership._agree = starts, agrees
    return found


def heals(number):
    send = feed._Feed._send_rest

    def slowly(*what):
        time.sleep(REST)
        send(*what)

    feed._Feed._send_rest = slowly
    if number < 2:
        sums = counts_sums()
        train(number, computes=COMPUTES)
        # In the second group: who has NCCL, and all else.
        assert sums[1:] == [2], sums
        # It did not wait for the newcomer before it computed, and had all samples that the newcomer had not.
        assert paused[number] < REST and first.tolist() == [BATCH / 2, BATCH / 2, 0], (paused, first)
        return
    newcomer = Newcomer()
    begins = train(number)
    print(f"it began at step {begins}; of {newcomer.compared} tensors it lacked {newcomer.wanted}")
    # Its own are BatchNorm's statistics, which differ on each rank, and their count.
    assert begins >= 3 * SKIPPED and newcomer.compared > 15 and newcomer.wanted == [(4,), (4,), ()], newcomer.wanted


def dies(number):
    """Only rank 1 feeds, and dies within it."""
    feed._PART, feed._PARTS = 1, 1 << 30
    if number == 0:
        feed.Feeds.offer = lambda *_: None

    def die(session):
        if any(len(one._has) == 2 for one in session._members.feeds._feeds):
            os._exit(0)

    if number < 2:
        train(number, die if number == 1 else lambda session: None)
        return
    newcomer = Newcomer()
    heal.Healing.catch_up = lambda self, seconds: self._thread.join(LIMIT)
    begins = train(number)
    assert begins > 0 and newcomer.compared == 0, newcomer.compared


def breaks(number):
    """What feeds the newcomer breaks when it has its place."""
    feed._Feed._send_rest = lambda one, *_: one.end()
    if number < 2:
        train(number)
        return
    newcomer = Newcomer()
    begins = train(number)
    assert begins >= 3 * SKIPPED and newcomer.compared == 0 and agent.place["round"] > agent.second["round"], agent.place


def lags(number):
    """The link to the newcomer is so slow that steps pile up."""
    send, feed._STEPS_BYTES = feed.send, 0

    def slowly(*what):
        time.sleep(0.5)
        send(*what)

    feed.send = slowly
    if number < 2:
        train(number)
        return
    newcomer = Newcomer()
    begins = train(number)
    # It was given up.
    assert begins > feed._STEPS and newcomer.compared == 0, newcomer.compared


def a_step_waits_until_the_one_before_is_sent():
    """However small its gradients are: what waits when the newcomer's round forms is in the way of that round."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here, there = socket.create_connection(server.getsockname()), server.accept()[0]
    sends, send, forming = threading.Event(), feed.send, worker.forming
    feed.send, worker.forming = lambda *what: sends.wait(LIMIT) and send(*what), lambda: None
    training = types.SimpleNamespace(model=torch.nn.Linear(1, 1), optimizers=[], step_number=1)
    one = feed._Feed(here, 1, training, timeout=LIMIT)
    assert is_sent_at_once(here)
    one.after_step()
    # The step before took long.
    one._asked -= LIMIT
    step = threading.Thread(target=one.before_step)
    step.start()
    step.join(0.3)
    assert step.is_alive()
    sends.set()
    step.join(LIMIT)
    assert not step.is_alive() and not one.over
    # It has all parameters now, and a step may wait for longer.
    assert not one._lacks and waits(one, 1.0) >= 3.0
    one._lacks.append(one._has[0])
    assert waits(one, 1.0) < 3.0
    one.end(), there.close()
    feed.send, worker.forming = send, forming


def waits(one, step):
    """How long a step may wait if the one before took so many seconds."""
    found, wait_for = [], one._moved.wait_for
    one._moved.wait_for = lambda predicate, seconds=None: found.append(seconds) or wait_for(predicate, seconds)
    one._asked = time.monotonic() - step
    one.before_step()
    one._moved.wait_for = wait_for
    return next(seconds for seconds in found if seconds != one._timeout / 4)


def rank(port, number, case, first):
    global agent
    agent = Agent(port, number, first, lost=case is dies)
    case(number)


if __name__ == "__main__":
    # The first optimizer of a process costs seconds of imports.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    a_step_waits_until_the_one_before_is_sent()
    for at, case in enumerate((heals, dies, breaks, lags)):
        for one in (done, ready, ends, slowest, paused, first):
            one.zero_()
        ranks.run(3, lambda number: rank(int(sys.argv[1]), number, case, 10 * at + 1), seconds=60)
        print(f"{case.__name__}: the slowest steps took {slowest.tolist()} s", flush=True)
        whole = [0, 2] if case is dies else [0, 1, 2]
        assert ends[0].any() and all(torch.equal(ends[one], ends[0]) for one in whole), ends
