"""A session's gradient is that of the mean loss over the global batch: with one rank and with two, from one pass and from
several, and zero where no pass has used a parameter; with counts it is the mean over all that was counted. A gradient
that is replaced in the middle of a step is refused."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks
from elastic_agent.torch.gradients import Gradients
from elastic_agent.torch.group import GroupLost
from elastic_agent.torch.operations import Collective
from elastic_agent.torch.votes import Vote

SAMPLES, BATCH = 24, 12


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(16, 300), torch.nn.Linear(300, 3)
        # In a bucket with others; used by the first step alone.
        self.at_first = torch.nn.Parameter(torch.ones(3))

    def forward(self, inputs, places):
        out = self.second(torch.tanh(self.first(inputs)))
        return out + self.at_first if places[0] < BATCH else out


inputs = torch.linspace(-1, 1, SAMPLES * 16, dtype=torch.float64).reshape(SAMPLES, 16).sin()
dataset = TensorDataset(inputs, torch.arange(SAMPLES) % 3, torch.arange(SAMPLES))
loss_of = torch.nn.functional.cross_entropy


def session_of(piece):
    model = Network().double()
    sampler = elastic.ElasticBatchSampler(dataset, BATCH, micro_batch=piece, shuffle=False)
    # The parameters stay: the gradient of each step can be computed again.
    return model, sampler, elastic.Session(model, torch.optim.SGD(model.parameters(), lr=0.0), sampler)


def tokens_of(places):
    return 1 + places % 4


def gives_gradients(piece, counted):
    model, sampler, session = session_of(piece)
    steps, seen = 0, {}

    def compare(optimizer, args, kwargs):
        nonlocal steps
        plain, some = Network().double(), slice(BATCH * steps, BATCH * (steps + 1))
        inputs, labels, places = (one[some] for one in dataset.tensors)
        if counted:
            tokens = tokens_of(places)
            ((loss_of(plain(inputs, places), labels, reduction="none") * tokens).sum() / tokens.sum()).backward()
        else:
            loss_of(plain(inputs, places), labels).backward()
        for (name, found), wanted in zip(model.named_parameters(), plain.parameters()):
            if wanted.grad is None:
                assert not found.grad.any(), f"{name}: {found.grad}"
            else:
                assert torch.allclose(found.grad, wanted.grad, rtol=1e-12, atol=1e-15), name
        steps += 1

    session.optimizer.register_step_pre_hook(compare)
    with session:
        for some, labels, places in session.steps(DataLoader(dataset, batch_sampler=sampler)):
            seen.setdefault(session.step_number, []).extend(places.tolist())
            if counted:
                losses, tokens = loss_of(model(some, places), labels, reduction="none"), tokens_of(places)
                session.backward((losses * tokens).sum(), count=int(tokens.sum()))
            else:
                session.backward(loss_of(model(some, places), labels))
            session.step()
    assert steps == SAMPLES // BATCH and len(seen) == steps, (steps, seen)


def refuses_another_gradient():
    model, sampler, session = session_of(4)
    refused = counts = False
    with session:
        for some, labels, places in session.steps(DataLoader(dataset, batch_sampler=sampler)):
            try:
                session.backward(loss_of(model(some, places), labels))
            except RuntimeError as error:
                assert "leave zero_grad to the session" in str(error), error
                refused = True
                break
            model.zero_grad(set_to_none=True)
            session.step()
    model, sampler, session = session_of(4)
    with session:
        for some, labels, places in session.steps(DataLoader(dataset, batch_sampler=sampler)):
            try:
                session.backward(model(some, places).sum(), count=None if session._step.done else 4)
            except RuntimeError as error:
                assert "give session.backward a count with each batch of a step, or with none" in str(error), error
                counts = True
                break
            session.step()
    assert refused and counts


class Sums:
    """A group whose sums have begun, and only some end."""

    rank, size = 0, 2

    def __init__(self, ends):
        self.ends = ends

    def start_sum(self, tensor):
        work = Collective(None)
        work.over = self.ends(tensor)
        return work

    def finish(self, work):
        if not work.over:
            raise GroupLost("the sum does not end")


def sums_that_are_under_way_keep_their_memory():
    """A sum that a group has left unfinished may still write: later gradients must be elsewhere."""
    model = torch.nn.Linear(300, 300)
    gradients = Gradients(model.named_parameters(), bucket_bytes=1)
    first, last = (bucket.flat for bucket in gradients._buckets)
    gradients.sum_over(Sums(lambda tensor: tensor is first), Vote())
    model(torch.ones(300)).sum().backward()
    try:
        gradients.finish()
    except GroupLost:
        gradients.clear()
    assert gradients._buckets[0].flat is first and gradients._buckets[1].flat is not last
    model(torch.ones(300)).sum().backward()
    last.fill_(7)
    assert (model.weight.grad == 1).all() and (model.bias.grad == 1).all()


def rank(port, size, piece, number):
    torch.set_num_threads(1)
    if size == 1:
        ranks.alone()
    else:
        ranks.Agent(port, number, size, 1, first_round=piece)
    gives_gradients(piece, counted=False)
    if size == 2:
        ranks.Agent(port, number, size, 1, first_round=100 + piece)
    gives_gradients(piece, counted=True)


if __name__ == "__main__":
    for size in (1, 2):
        for piece in (BATCH, 5, 2):
            ranks.run(size, lambda number: rank(int(sys.argv[1]), size, piece, number))
    ranks.run(1, lambda number: (ranks.alone(), refuses_another_gradient()))
    sums_that_are_under_way_keep_their_memory()
