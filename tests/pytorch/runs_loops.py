"""Loops as scripts have them, on one and on two ranks: by epochs, with a scheduler that follows them, with a clipped
gradient in several batches, with augmentation in a loader's processes; and what a session refuses. What an agent says is
simulated."""

import contextlib
import copy
import io
import pathlib
import sys
import tempfile

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks

SAMPLES, BATCH, EPOCHS = 40, 10, 3
# What each rank has drawn for its samples, in an epoch.
drawn = torch.zeros(2, SAMPLES, dtype=torch.float64).share_memory_()


class Augmented(torch.utils.data.Dataset):
    """A sample is its number, and what the process that reads it draws."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        return number, torch.rand((), dtype=torch.float64)


def built(seed, **how):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 2).double()
    inputs = torch.linspace(-3, 3, SAMPLES * 4, dtype=torch.float64).reshape(SAMPLES, 4).sin()
    dataset = TensorDataset(inputs, torch.arange(SAMPLES) % 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, dataset, elastic.ElasticBatchSampler(dataset, BATCH, seed=3, **how)


def by_epochs(number, micro_batch):
    """Returns the parameters, and the epochs and learning rates that the script saw."""
    model, optimizer, dataset, sampler = built(number + 1, micro_batch=micro_batch)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen, clipped = [], 0
    more = {"scheduler": scheduler, "scheduler_per": "epoch", "seed": 5}
    with elastic.Session(model, optimizer, sampler, **more) as session:
        for epoch in session.epochs(EPOCHS):
            seen.append((epoch.number, optimizer.param_groups[0]["lr"]))
            for inputs, labels in epoch.batches(DataLoader(dataset, batch_sampler=sampler)):
                session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
                complete, norm = session.step_is_complete, session.clip(0.01)
                assert complete is (norm is not None)
                clipped += complete
                assert session.step() is complete
    assert clipped == EPOCHS * SAMPLES // BATCH
    assert seen == [(0, 1.0), (1, 0.5), (2, 0.25)], seen
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def draws(number):
    model, optimizer, _, _ = built(0)
    sampler = elastic.ElasticBatchSampler(Augmented(), BATCH, seed=3)
    with elastic.Session(model, optimizer, sampler) as session:
        for samples, numbers in session.steps(DataLoader(Augmented(), batch_sampler=sampler, num_workers=1)):
            drawn[number, samples] = numbers
            session.backward(model(torch.ones(1, 4).double()).sum())
            session.step()
        # The second session of this round has met the other rank at once.
        assert session._members.place["round"] == 1


def rank(port, number):
    torch.set_num_threads(1)
    ranks.Agent(port, number, 2, 1)
    both = by_epochs(number, micro_batch=2)
    draws(number)
    ranks.alone()
    one = by_epochs(0, micro_batch=BATCH)
    # All begin with the parameters of rank 0.
    assert torch.allclose(both, one, rtol=1e-9), (both, one)


def trained_later(more):
    """One layer is unfrozen when the session has begun."""
    _, _, dataset, sampler = built(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2).double(), more.requires_grad_(False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with elastic.Session(model, optimizer, sampler) as session:
        for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler)):
            if session.step_number == 2:
                more.requires_grad_(True)
            session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            session.step()


class Holds:
    """A scheduler of the script's own, whose state is one value."""

    def __init__(self, of):
        self.of = of

    def step(self):
        pass

    def state_dict(self):
        return {"of": self.of}

    def load_state_dict(self, state):
        self.of = state["of"]


def values(value, folder=None):
    """What a checkpoint gives back of a state that has NumPy's numbers and this value."""
    model, optimizer, dataset, sampler = built(0)
    optimizer.param_groups[0]["lr"] = numpy.float64(0.5)
    with elastic.Session(model, optimizer, sampler, scheduler=Holds(value), checkpoint_dir=folder) as session:
        for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler)):
            session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            session.step()


def read_again():
    with tempfile.TemporaryDirectory() as name:
        values({3, "a"}, name)
        (path,) = pathlib.Path(name).glob("*.pt")
        state = torch.load(path, weights_only=True)
    assert state["scheduler"]["of"] == {3, "a"} and state["optimizer"]["param_groups"][0]["lr"] == 0.5, state


def warms_up():
    """A first pass of a model leaves nothing behind."""
    torch.manual_seed(1)
    layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)
    model, inputs = torch.nn.Sequential(*layers), torch.randn(8, 4)
    session = elastic.Session(model, torch.optim.SGD(model.parameters()), elastic.ElasticBatchSampler(SAMPLES, BATCH))
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    passes = []

    def loss():
        passes.append(model(inputs).sum())
        return passes[-1]

    session.warm_up(loss)
    assert len(passes) == 1 and all(one.grad is None for one in model.parameters())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def refusals():
    model, optimizer, dataset, sampler = built(0)
    told = io.StringIO()
    with contextlib.redirect_stderr(told), elastic.Session(model, optimizer, sampler) as session:
        for _ in range(2):
            for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler), epochs=1):
                session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
                session.step()
    assert "has nothing left to do: `epochs=1`" in told.getvalue(), told.getvalue()
    ranks.refused("scheduler_per", lambda: elastic.Session(model, optimizer, sampler, scheduler_per="week"))
    lbfgs = torch.optim.LBFGS(model.parameters())
    ranks.refused("LBFGS", lambda: elastic.Session(model, lbfgs, sampler))
    for layer, complaint in [
        (torch.nn.Linear(4, 2, dtype=torch.complex64), "'0.weight' is complex"),
        (torch.nn.Embedding(4, 2, sparse=True), "'0' would be sparse"),
    ]:
        odd = torch.nn.Sequential(layer)
        ranks.refused(complaint, lambda: elastic.Session(odd, torch.optim.SGD(odd.parameters()), sampler))
    more = torch.nn.Linear(2, 2).double()
    both = torch.optim.SGD([*model.parameters(), *more.parameters()])
    ranks.refused("parameter of shape (2, 2)", lambda: elastic.Session(model, both, sampler))
    ranks.refused("parameter of shape (2, 2)", lambda: trained_later(more))
    try:
        values(pathlib.Path("here"))
    except TypeError as error:
        assert "state['scheduler']['of']" in str(error) and "Path" in str(error), error
    else:
        raise AssertionError("a state that cannot be sent was not refused")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    ranks.refused("wrapped in DistributedDataParallel", lambda: elastic.Session(wrapped, optimizer, sampler))
    ranks.refused("init_process_group", lambda: elastic.Session(model, optimizer, sampler))
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks.run(2, lambda number: rank(int(sys.argv[1]), number))
    of_both = drawn[drawn > 0]
    assert len(of_both) == SAMPLES == len(set(of_both.tolist())), "two samples of a step have the same random number"
    ranks.alone()
    read_again()
    warms_up()
    refusals()
    sys.stdout.flush()
