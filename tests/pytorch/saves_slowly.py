"""What takes longer than an exchange between ranks may take ends no group: a disk where a checkpoint is written or read,
what one rank does aside, a first pass, a pause of rank 0. Lines tell of the disk, ever fewer of them. A round that forms meanwhile does not wait for the disk. The last
step is on disk when the session ends, so that a worker that starts later has nothing to do. What an agent says is
simulated."""

import math
import pathlib
import os
import signal
import sys
import tempfile
import threading
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks
from elastic_agent import worker
from elastic_agent.torch import checkpoints, files

RANKS, STEPS, LIMIT, SLOW, PATIENCE = 2, 5, 1.0, 1.5, 0.3
committed, told = {}, []


def slowly(call, does, path):
    """A call that takes long. Lines have told of it, each after twice the pause of the one before."""

    def slow(*arguments):
        told.clear()
        began = time.monotonic()
        time.sleep(SLOW)
        lines, most = list(told), math.log2((time.monotonic() - began) / PATIENCE + 1)
        assert 0 < len(lines) <= most, (lines, most)
        assert all(f"{does} {path}/" in line and "does not answer" in line for line in lines), lines
        return call(*arguments)

    return slow


def train(number, folder, name=""):
    """Returns the steps that were done here, and the place in the end."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    dataset = TensorDataset(torch.randn(10 * STEPS, 4), torch.zeros(10 * STEPS).long())
    sampler, done = elastic.ElasticBatchSampler(dataset, 10), 0
    session = elastic.Session(
        model, optimizer, sampler, name=name, checkpoint_dir=folder, checkpoint_every=3, operation_timeout=LIMIT
    )
    with session:
        for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler)):
            if done == 0 and number == 1:
                # As where a newcomer compiles.
                time.sleep(2 * SLOW)
            session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            done += session.step()
            if done == 2 and number == 0:
                # What only rank 0 does, by a script that knows of no `aside`.
                time.sleep(2 * SLOW)
            if done == 3:
                with session.aside():
                    # Another rank's evaluation is shorter.
                    time.sleep(SLOW * number)
    return done, session._members.place


def rank(port, folder, number):
    torch.set_num_threads(1)
    agent = ranks.Agent(port, number, RANKS, 1)
    worker.commit_checkpoint = lambda step, path, **more: committed.update(step=step, path=path, **more)
    files._PATIENCE, files.say = PATIENCE, told.append
    checkpoints.write = slowly(checkpoints.write, "writing", folder)
    checkpoints._read = slowly(checkpoints._read, "reading", folder)
    done, place = train(number, folder)
    assert (done, place["round"]) == (STEPS, 1), (done, place)
    assert number > 0 or committed["step"] == STEPS, committed
    # Both start again, as after a failure in what the script does next.
    saved = sorted(folder.glob("*.pt"))
    where = {"step": STEPS, "path": str(saved[-1]), "digest": worker.digest_of(saved[-1])}
    agent.place = {**agent.place, "round": 2, "checkpoint": where}
    committed.clear()
    done, place = train(number, folder)
    assert (done, place["round"], committed) == (0, 2, {}), (done, place, committed)
    # What another session has saved is not taken for this one's.
    agent.place = {**agent.place, "round": 3}
    done, _ = train(number, folder, "second")
    assert done == STEPS and (folder / "second").is_dir(), done


def rests(agent, number, case, folder):
    """A round forms while rank 0 uses the disk. Its agent would end a worker that comes to rest only afterwards."""
    rested, tried, both = threading.Event(), [], agent.place
    write, read, worker.quiesce_time = checkpoints.write, checkpoints.read, lambda: 1.0

    def quiesce(step):
        rested.set()
        leaves = {"world_size": 1} if case == "a rank leaves" else {}
        agent.place = {**agent.place, **leaves, "round": agent.place["round"] + 1}
        return agent.place

    def uses_the_disk(call, *arguments):
        if not tried:
            tried.append(call)
            if case != "a rank leaves":
                session._members._round_forms(both["round"] + 1, "a node joins")
            assert rested.wait(8), f"{case}: the disk was waited for"
        return call(*arguments)

    worker.quiesce = quiesce
    checkpoints.write = lambda *arguments: uses_the_disk(write, *arguments)
    checkpoints.read = lambda *arguments: uses_the_disk(read, *arguments)
    model = torch.nn.Linear(4, 2)
    dataset = TensorDataset(torch.randn(10 * STEPS, 4), torch.zeros(10 * STEPS).long())
    sampler, optimizer = elastic.ElasticBatchSampler(dataset, 10), torch.optim.SGD(model.parameters(), lr=1e-2)
    session = elastic.Session(
        model, optimizer, sampler, name=case, checkpoint_dir=folder, checkpoint_every=3, loss_timeout=0.1
    )
    with session:
        for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler)):
            if session.step_number == 1 and case == "a rank leaves" and number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            session.step()
    checkpoints.write, checkpoints.read = write, read
    assert session.step_number == STEPS and (tried or number > 0), (case, tried)
    assert session._members.place["round"] == both["round"] + 1, session._members.place


def rank_with_a_disk(port, folder, case, at, number):
    torch.set_num_threads(1)
    agent = ranks.Agent(port, number, 1 if case == "it is alone" else RANKS, 1, first_round=100 + 10 * at)
    worker.commit_checkpoint = lambda step, path, **more: committed.update(step=step, path=path, **more)
    try:
        rests(agent, number, case, folder)
        if case == "two are there":
            assert number > 0 or committed["step"] == STEPS
            # The next workers read it.
            (path,) = pathlib.Path(folder, case).glob(f"*{STEPS}-round-*.pt")
            where = {"step": STEPS, "path": str(path), "digest": worker.digest_of(path)}
            agent.place = {**agent.place, "round": 150, "checkpoint": where}
            rests(agent, number, case, folder)
    except SystemExit as end:
        assert (number, case) == (1, "a rank leaves") and end.code == 128 + signal.SIGTERM, end.code


if __name__ == "__main__":
    for at, case in enumerate(("two are there", "it is alone", "a rank leaves")):
        with tempfile.TemporaryDirectory() as name:
            count = 1 if case == "it is alone" else RANKS
            ranks.run(count, lambda number: rank_with_a_disk(int(sys.argv[1]), pathlib.Path(name), case, at, number))
    with tempfile.TemporaryDirectory() as name:
        ranks.run(RANKS, lambda number: rank(int(sys.argv[1]), pathlib.Path(name), number))
