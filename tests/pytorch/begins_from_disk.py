"""Where a session begins whose job's store knows no checkpoint: at the newest in its folder, or not at all. Each life of
a job has two ranks of its own. What an agent says is simulated."""

import fcntl
import os
import pathlib
import sys
import tempfile

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks
from elastic_agent import worker
from elastic_agent.torch import beginning

lives = iter(range(100))
# The step that each rank began after.
begun = torch.zeros(2, dtype=torch.int64).share_memory_()
committed = torch.zeros(1, dtype=torch.int64).share_memory_()


def train(number, folder, epochs, resume):
    torch.manual_seed(number)
    model = torch.nn.Linear(4, 2)
    dataset = TensorDataset(torch.randn(24, 4), torch.zeros(24).long())
    sampler = elastic.ElasticBatchSampler(dataset, 6, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    begins = {"checkpoint_dir": folder, "checkpoint_every": 3, "keep_checkpoints": 9, "resume": resume}
    with elastic.Session(model, optimizer, sampler, **begins) as session:
        begun[number] = session.step_number
        for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler), epochs=epochs):
            session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            session.step()


def life(folder, epochs, job, resume="auto", done=0, unnamed=False):
    """The step that both ranks of a job begin after; or why they do not, by rank 0's word. done: the steps that the store
    knows of."""
    port, at, why = int(sys.argv[1]), next(lives), pathlib.Path(folder, "why")

    def rank(number):
        torch.set_num_threads(1)
        # The rounds of one store differ.
        agent = ranks.Agent(port, number, 2, 1, first_round=1000 * at + 1)
        agent.place["job"], worker.steps_done = job, lambda: done
        os.environ["ELASTIC_JOB_UNNAMED"] = str(int(unnamed))
        worker.commit_checkpoint = lambda step, path, **_: committed.fill_(step)
        try:
            train(number, folder, epochs, resume)
        except SystemExit as end:
            why.write_text(str(end.code))
            # The job ends with it: the other rank would wait for a round.
            os._exit(1 if number == 0 else 0)

    try:
        ranks.run(2, rank)
    except SystemExit:
        told = why.read_text()
        why.unlink()
        return told
    assert begun[0] == begun[1], begun
    return int(begun[0])


def alone(folder, epochs):
    def rank(number):
        ranks.alone()
        train(number, folder, epochs, "auto")

    ranks.run(1, rank)
    return int(begun[0])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder, other = pathlib.Path(name, "own"), pathlib.Path(name, "other")
        folder.mkdir(), other.mkdir()
        assert life(folder, 2, "7f9c", unnamed=True) == 0
        before = {path: path.read_bytes() for path in folder.glob("*.pt")}
        # A job without an id of its own continues, and the store knows that from the beginning
        committed.zero_()
        assert life(folder, 2, "0b1d", unnamed=True) == 8 and committed == 8, committed
        assert life(folder, 3, "0b1d", unnamed=True) == 8
        assert before.items() <= {path: path.read_bytes() for path in folder.glob("*.pt")}.items(), "it is overwritten"
        assert alone(folder, 3) == 12
        # Two at once
        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            beginning._PATIENCE = 0.2
            told = life(folder, 3, "0b1d", unnamed=True)
            assert f"another run saves in {folder}" in told, told
        # Another job has to say that it means this
        told = life(folder, 3, "J")
        assert "belongs to job 7f9c, and holds step 12" in told and f"resume={str(folder)!r}" in told, told
        assert life(folder, 3, "J", str(folder)) == 12
        told = life(folder, 3, "J", "never")
        assert "holds step 12" in told and "resume='auto'" in told, told
        assert life(folder, 3, "J", "never", done=12) == 12, "a later start"
        assert life(other, 3, "J", f"{folder}@9") == 9
        # What was done and is nowhere is no beginning
        (empty := pathlib.Path(name, "empty")).mkdir()
        told = life(empty, 3, "J", done=5)
        assert "has done 5 steps" in told and "no checkpoint was committed in" in told, told
