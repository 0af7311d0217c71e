"""Loops as scripts have them, on one and on two ranks: by epochs, with a scheduler that follows them, with a clipped
gradient in several batches, with augmentation in a loader's processes; and what a session refuses. What an agent says is
simulated."""

import contextlib
import copy
import io
import mmap
import pathlib
import random
import sys
import tempfile

import numpy
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks
from elastic_agent import worker
from elastic_agent.torch import tree
from elastic_agent.torch.frozen import Frozen
from elastic_agent.torch.keeper import Keeper
from elastic_agent.torch.slots import Slots
from elastic_agent.torch.state import Training

SAMPLES, BATCH, EPOCHS = 40, 10, 3
# What each rank has drawn for its samples in two epochs, by torch, NumPy and Python.
drawn = torch.zeros(2, 2, SAMPLES, 3, dtype=torch.float64).share_memory_()


# How often each sample was read for an evaluation, and what each rank has in the end.
read = torch.zeros(23, dtype=torch.int64).share_memory_()
ends = torch.zeros(2, 16, dtype=torch.float64).share_memory_()
firsts = torch.zeros(2, 11, dtype=torch.float64).share_memory_()


class Augmented(torch.utils.data.Dataset):
    """A sample is its number, and what the process that reads it draws."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        return number, torch.tensor([torch.rand(()).item(), numpy.random.rand(), random.random()], dtype=torch.float64)


class InOne(Augmented):
    """It reads all samples of a batch at once."""

    def __getitems__(self, numbers):
        return list(map(self.__getitem__, numpy.array(numbers).tolist()))


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


def draws(place, processes, dataset=Augmented):
    """Writes to a place of `drawn`. Python's and NumPy's numbers are those of the script, and all others are seeded."""
    model, optimizer, _, _ = built(0)
    sampler = elastic.ElasticBatchSampler(dataset(), BATCH, seed=3)
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    with elastic.Session(model, optimizer, sampler, seed=11) as session:
        loader = DataLoader(dataset(), batch_sampler=sampler, num_workers=processes)
        for samples, numbers in session.steps(loader, epochs=2):
            place[session.epoch, samples] = numbers
            session.backward(model(torch.ones(1, 4).double()).sum())
            session.step()
        # The second session of this round has met the other rank at once.
        assert session._members.place["round"] < 2
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


def same_draws():
    """What was drawn does not depend on the number of ranks, nor of loader processes."""
    of_both = drawn.sum(0)
    assert not (drawn[0] * drawn[1]).any() and len(set(of_both.flatten().tolist())) == of_both.numel()
    for processes in (0, 1):
        alone = torch.zeros(2, SAMPLES, 3, dtype=torch.float64)
        draws(alone, processes)
        assert torch.equal(alone, of_both), processes
    # Where a batch is read as a whole its samples have the batch's numbers.
    for processes in (0, 1):
        whole = torch.zeros(2, SAMPLES, 3, dtype=torch.float64)
        draws(whole, processes, InOne)
        assert len(set(whole.flatten().tolist())) == whole.numel(), processes


def norms(number):
    """The last of five steps has three samples, and BatchNorm cannot train on one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).double()
    inputs = torch.linspace(-3, 3, 43 * 4, dtype=torch.float64).reshape(43, 4).sin()
    dataset, used = TensorDataset(inputs, torch.arange(43) % 2), 0
    sampler = elastic.ElasticBatchSampler(dataset, BATCH, micro_batch=4)
    with elastic.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), sampler) as session:
        for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler)):
            used += session._step.batches[session._step.done]
            session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            session.step()
    # Two steps of ten in units of two, and so on: the parts of both ranks are all samples.
    assert (number, used) in ((0, 16), (1, 27)), (number, used)


def two_sessions(agent, number):
    """Rank 1 starts when rank 0 has completed the first session, and gets its result."""
    round_, both = agent.place["round"] + 1, agent.place
    agent.place = {**both, "round": round_ + 1}
    if number == 0:
        agent.place = {**both, "round": round_, "world_size": 1}
    model, optimizer, dataset, sampler = built(number)
    loader, evaluated = DataLoader(dataset, batch_sampler=sampler), DataLoader(Counted(), batch_size=4)
    with elastic.Session(model, optimizer, sampler, name="first") as session:
        for inputs, labels in session.steps(loader, epochs=2):
            assert number == 0
            session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            session.step()
        assert list(session.epochs(2)) == [] and session.epoch == 2 and session.step_number == 8
        total = session.evaluate(evaluated, lambda batch: model(batch).sum())
    agent.place = {**both, "round": round_ + 1}
    firsts[number] = torch.cat([total.view(1), *(one.detach().flatten() for one in model.parameters())])
    model, optimizer, dataset, sampler = built(2 + number)
    with elastic.Session(model, optimizer, sampler, name="second") as session:
        for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler)):
            session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            session.step()
        assert session.step_number == 4 and session._members.place["round"] == round_ + 1
    agent.place = {**both, "round": round_ + 2}
    worker.give_up, given_up = lambda reason: sys.exit(reason), None
    try:
        with elastic.Session(*built(0)[:2], built(0)[3], name=f"third of {number}"):
            pass
    except SystemExit as end:
        given_up = end.code
    assert given_up == "the ranks are in sessions of different names: 'third of 0' on rank 0; 'third of 1' on rank 1"


class Counted(torch.utils.data.Dataset):
    """It counts how often each sample is read."""

    def __len__(self):
        return 23

    def __getitem__(self, number):
        read[number] += 1
        return torch.full((4,), float(number), dtype=torch.float64)


def evaluates(number):
    """After a broken group, too; and rank 0 alone leaves the loop."""
    model, optimizer, dataset, sampler = built(0)
    model = torch.nn.Sequential(model, torch.nn.Dropout(0.5).eval())
    loader, sums = DataLoader(Counted(), batch_size=4, num_workers=number), []

    def measure(batch):
        assert not model.training and not torch.is_grad_enabled()
        return torch.stack([model(batch).sum(), torch.tensor(float(len(batch)))])

    def breaks(batch):
        session._members.group.cut()
        return measure(batch)

    more = {"loss_timeout": 0.1}
    with elastic.Session(model, optimizer, sampler, **more) as session:
        for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler), epochs=2):
            session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            if not session.step():
                continue
            if session.step_number in (1, 2):
                sums.append(session.evaluate(loader, breaks if (session.step_number, number) == (2, 1) else measure))
            assert model.training and not model[1].training
            if session.step_number == 6 and number == 0:
                break
        assert session.step_number == 6, session.step_number
        sums.append(session.evaluate(loader, measure))
        assert session._members.place["round"] == 2
    assert all(one[1] == 23 for one in sums), sums
    ends[number] = torch.cat([torch.stack(sums).flatten(), *(one.detach().flatten() for one in model.parameters())])


def loses_its_state(number):
    """Only the agent of rank 1 knows how far the job has come."""
    worker.steps_done = lambda: 7 * number
    try:
        by_epochs(number, micro_batch=2)
    except SystemExit as end:
        assert "has done 7 steps" in end.code and "no `checkpoint_dir`" in end.code and "--fresh" in end.code, end
    else:
        raise AssertionError("it began again at step 0")
    worker.steps_done = lambda: 0


def rank(port, number):
    torch.set_num_threads(1)
    agent = ranks.Agent(port, number, 2, 1)
    loses_its_state(number)
    both = by_epochs(number, micro_batch=2)
    draws(drawn[number], 2)
    norms(number)
    evaluates(number)
    two_sessions(agent, number)
    ranks.alone()
    one = by_epochs(0, micro_batch=BATCH)
    # All begin with the parameters of rank 0.
    assert torch.allclose(both, one, rtol=1e-9), (both, one)


def changed_later(change):
    """A model that is changed when the session has begun."""
    _, _, dataset, sampler = built(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 2).requires_grad_(False)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with elastic.Session(model, optimizer, sampler) as session:
        for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler)):
            if session.step_number == 2:
                change(model, optimizer)
            session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            session.step()
            assert session.step_number < 3


def refuses_later_changes():
    new = torch.nn.Linear(2, 2).double()
    for change, complaint in [
        (lambda model, _: model[1].weight.requires_grad_(True), "'1.weight' was unfrozen"),
        (lambda model, _: model[0].bias.requires_grad_(False), "'0.bias' was frozen"),
        (lambda model, _: setattr(model, "1", new), "'1.weight' is new"),
        (lambda model, _: model.append(new), "'2.weight' is new"),
        (lambda model, _: model.pop(1), "'1.weight' is gone"),
        (lambda _, optimizer: optimizer.add_param_group({"params": list(new.parameters())}), "parameter of shape (2, 2)"),
    ]:
        ranks.refused(complaint, lambda: changed_later(change))


class Shared(torch.nn.Module):
    """Its layer is part of two parts that are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4).double()

    def forward(self, inputs):
        return checkpoint(self.layer, checkpoint(self.layer, inputs, use_reentrant=True), use_reentrant=True)


def checkpointed():
    model, inputs = Shared(), torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
    sampler = elastic.ElasticBatchSampler(4, 4)
    with elastic.Session(model, torch.optim.SGD(model.parameters(), lr=1.0), sampler) as session:
        for _ in session.steps(DataLoader(range(4), batch_sampler=sampler)):
            session.backward(model(inputs).mean())
            session.step()


def refuses_what_sums_too_early():
    try:
        checkpointed()
    except RuntimeError as error:
        assert "'layer.bias' was computed twice" in str(error) or "'layer.weight' was" in str(error), error
    else:
        raise AssertionError("a layer that two checkpointed parts share was not refused")


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


def copies_frozen_weights_once():
    """Each of the two slots in memory gets them once, and again when the script has changed them. Such as LoRA's."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 2))
    model[0].requires_grad_(False)
    optimizer, memory, copied = torch.optim.SGD(model[1].parameters(), lr=0.1), mmap.mmap(-1, 1 << 22), []
    copy, Slots._copy = Slots._copy, lambda slots, at, one: copied.append(one.numel()) or copy(slots, at, one)
    worker.memory = lambda size, **_: memory
    facts, trained = {}, [one.numel() for one in model[1].parameters()]
    keeper = Keeper(facts, optimizers=[optimizer], folder=None, frozen=Frozen(model.parameters()))
    changes = {8: lambda one: one.data.mul_(1.5), 9: lambda one: one.data.neg_(), 14: torch.nn.init.ones_}
    for step in range(1, 20):
        if step in changes:
            changes[step](model[0].weight)
        model(torch.randn(3, 300)).sum().backward()
        optimizer.step()
        copied.clear()
        assert keeper.take(step, 1, model.state_dict(), (0, 1), saves=False)
        keeper.copied(30)
        # One snapshot after a change may see the next one, and so each slot has them at the third.
        known = step in (4, 5, 6, 7, 12, 13, 17, 18, 19)
        assert (copied == trained) is known, (step, copied)
        held = Slots(memory).whole()[0]
        held.check()
        assert held.step == step and all(torch.equal(one, held.state()[name]) for name, one in model.state_dict().items())
    Slots._copy = copy


def keeps_types():
    """An optimizer whose state has more digits than the parameters."""
    trainings = []
    for _ in range(2):
        model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainings.append(Training(model, optimizer, elastic.ElasticBatchSampler(SAMPLES, BATCH)))
    optimizer = trainings[0].optimizers[0]
    for one in optimizer.param_groups[0]["params"]:
        optimizer.state[one]["momentum_buffer"] = torch.rand(one.shape)
    trainings[1].load(tree.put_together(*tree.take_apart(trainings[0].value())))
    here, there = (one.optimizers[0].state_dict()["state"] for one in trainings)
    for number in (0, 1):
        assert torch.equal(here[number]["momentum_buffer"], there[number]["momentum_buffer"])


def warms_up():
    """A first pass of a model leaves nothing behind."""
    torch.manual_seed(1)
    layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)
    model, inputs = torch.nn.Sequential(*layers), torch.randn(8, 4)
    session = elastic.Session(model, torch.optim.SGD(model.parameters()), elastic.ElasticBatchSampler(SAMPLES, BATCH))
    before, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    passes = []

    def loss():
        passes.append(model(inputs).sum())
        return passes[-1]

    session.warm_up(loss)
    assert len(passes) == 1 and all(one.grad is None for one in model.parameters())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)


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
    for layer, complaint in [
        (torch.nn.SyncBatchNorm(2), "'1' is a SyncBatchNorm"),
        (torch.nn.BatchNorm1d(2), "cannot train on one sample, and the last step of each epoch has one"),
    ]:
        with_norm = torch.nn.Sequential(torch.nn.Linear(4, 2), layer)
        one_left = elastic.ElasticBatchSampler(41, 10)
        ranks.refused(complaint, lambda: elastic.Session(with_norm, torch.optim.SGD(with_norm.parameters()), one_left))
    both = torch.optim.SGD([*model.parameters(), *more.parameters()])
    ranks.refused("parameter of shape (2, 2)", lambda: elastic.Session(model, both, sampler))
    try:
        values(pathlib.Path("here"))
    except TypeError as error:
        assert "state['scheduler']['of']" in str(error) and "Path" in str(error), error
    else:
        raise AssertionError("a state that cannot be sent was not refused")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    inner = torch.nn.Sequential(wrapped)
    for one, name in ((wrapped, "the model"), (inner, "'0'")):
        ranks.refused(f"{name} is wrapped in DistributedDataParallel", lambda: elastic.Session(one, optimizer, sampler))
    ranks.refused("init_process_group", lambda: elastic.Session(model, optimizer, sampler))
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks.run(2, lambda number: rank(int(sys.argv[1]), number))
    ranks.alone()
    same_draws()
    assert ends.any() and torch.allclose(ends[0], ends[1], rtol=1e-12), ends
    # By one rank in each of three evaluations, by both when the group was broken, and by both in two sessions.
    assert read.tolist() == [7] * 23, read
    assert firsts.any() and torch.equal(firsts[0], firsts[1]), firsts
    read_again()
    keeps_types()
    copies_frozen_weights_once()
    warms_up()
    refusals()
    refuses_later_changes()
    refuses_what_sums_too_early()
    sys.stdout.flush()
