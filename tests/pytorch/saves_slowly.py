"""What takes longer than an exchange between ranks may take ends no group: a disk where a checkpoint is written or read,
what one rank does aside, a first pass, a pause of rank 0. The last step is on disk when the session ends, so that a worker
that starts later has nothing to do. What an agent says is simulated."""

import pathlib
import sys
import tempfile
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks
from elastic_agent import worker
from elastic_agent.torch import checkpoints

RANKS, STEPS, LIMIT, SLOW = 2, 5, 1.0, 1.5
committed = {}


def slowly(call):
    def slow(*arguments):
        time.sleep(SLOW)
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
    checkpoints.write, checkpoints.read = slowly(checkpoints.write), slowly(checkpoints.read)
    done, place = train(number, folder)
    assert (done, place["round"]) == (STEPS, 1), (done, place)
    assert number > 0 or committed["step"] == STEPS, committed
    # Both start again, as after a failure in what the script does next.
    files = sorted(folder.glob("*.pt"))
    where = {"step": STEPS, "path": str(files[-1]), "digest": worker.digest_of(files[-1])}
    agent.place = {**agent.place, "round": 2, "checkpoint": where}
    committed.clear()
    done, place = train(number, folder)
    assert (done, place["round"], committed) == (0, 2, {}), (done, place, committed)
    # What another session has saved is not taken for this one's.
    agent.place = {**agent.place, "round": 3}
    done, _ = train(number, folder, "second")
    assert done == STEPS and (folder / "second").is_dir(), done


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        ranks.run(RANKS, lambda number: rank(int(sys.argv[1]), pathlib.Path(name), number))
