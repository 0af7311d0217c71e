"""Loops as scripts have them, on one and on two ranks: by epochs, with a scheduler that follows them, with a clipped
gradient in several batches, with augmentation in a loader's processes; and what a session refuses. What an agent says is
simulated."""

import contextlib
import io
import sys

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


def rank(port, number):
    torch.set_num_threads(1)
    ranks.Agent(port, number, 2, 1)
    both = by_epochs(number, micro_batch=2)
    draws(number)
    ranks.alone()
    one = by_epochs(0, micro_batch=BATCH)
    # All begin with the parameters of rank 0.
    assert torch.allclose(both, one, rtol=1e-9), (both, one)


def refusals():
    model, optimizer, dataset, sampler = built(0)
    told = io.StringIO()
    with contextlib.redirect_stderr(told), elastic.Session(model, optimizer, sampler) as session:
        for _ in range(2):
            for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler), epochs=1):
                session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
                session.step()
    assert "has nothing to do: 1 epochs" in told.getvalue(), told.getvalue()
    ranks.refused("scheduler_per", lambda: elastic.Session(model, optimizer, sampler, scheduler_per="week"))
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
    refusals()
    sys.stdout.flush()
