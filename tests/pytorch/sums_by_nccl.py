"""Three ranks train by the stand-in for NCCL: undisturbed, when the group is cut in a step, when NCCL fails, hangs,
cannot connect, or is not asked for. All end as one rank alone does. Usage: sums_by_nccl.py PORT LIBRARY"""

import contextlib
import io
import os
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks
import stand_in

SAMPLES, BATCH, SIZE, EPOCHS = 43, 10, 3, 3
STEPS = EPOCHS * 5


def train(number, *, backend=None, hook=lambda session: None, timeout=60.0):
    """Returns the parameters after the last epoch, and which of the steps were summed by NCCL."""
    torch.manual_seed(1)
    layers = torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3)
    model = torch.nn.Sequential(*layers).double()
    inputs = torch.linspace(-1, 1, SAMPLES * 16).reshape(SAMPLES, 16).sin().double()
    dataset = TensorDataset(inputs, torch.arange(SAMPLES) % 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = elastic.ElasticBatchSampler(dataset, global_batch=BATCH, seed=3)
    by_nccl = []
    with elastic.Session(
        model, optimizer, sampler, backend=backend, seed=1, operation_timeout=timeout, loss_timeout=0.2
    ) as session:
        for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler), epochs=EPOCHS):
            hook(session)
            used = session._members.group._nccl is not None
            session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            if session.step():
                by_nccl.append(used)
    assert session.step_number == len(by_nccl) == STEPS, (session.step_number, by_nccl)
    return torch.cat([one.detach().flatten() for one in model.parameters()]), by_nccl


def in_step(step, *what):
    """Calls these in this step: one each time that it is done."""
    left = list(reversed(what))

    def hook(session):
        if session.step_number == step and left:
            left.pop()(session)

    return hook


def undisturbed(number):
    parameters, by_nccl = train(number)
    assert all(by_nccl), by_nccl
    return parameters


def cut_in_a_step(number):
    hook = in_step(4, lambda session: number == 1 and session._members.group.cut())
    parameters, by_nccl = train(number, hook=hook)
    assert all(by_nccl), by_nccl
    return parameters


def failing(number):
    """NCCL's sums fail on one rank, and no one is gone. After the second failure all do without it."""

    def fail(session):
        if number == 1 and session.step_number == 4 and session._members.group._nccl:
            os.environ["FAKE_NCCL_FAIL"] = "ncclAllReduce:2"

    parameters, by_nccl = train(number, hook=fail)
    assert by_nccl == [True] * 4 + [False] * (STEPS - 4), by_nccl
    return parameters


def hanging(number):
    """A sum never ends, and no one is gone."""

    def hang(session):
        if number == 2:
            os.environ["FAKE_NCCL_HANG"] = "ncclAllReduce"

    hook = in_step(4, hang, lambda _: os.environ.pop("FAKE_NCCL_HANG", None))
    parameters, by_nccl = train(number, hook=hook, timeout=2)
    assert all(by_nccl), by_nccl
    return parameters


def cut_while_nccl_takes_a_sum(number):
    """A peer's end is seen, though NCCL does not come to an end with what it was given: it is no failure of NCCL's."""

    def stall(session):
        if number == 1:
            session._members.group.cut()
        else:
            os.environ["FAKE_NCCL_STALL"] = "ncclAllReduce"

    hook = in_step(4, stall, lambda _: os.environ.pop("FAKE_NCCL_STALL", None))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        parameters, by_nccl = train(number, hook=hook)
    assert all(by_nccl) and "NCCL has failed" not in said.getvalue(), (by_nccl, said.getvalue())
    return parameters


def unconnected(number):
    """As for two ranks on one GPU: code 5."""
    os.environ["FAKE_NCCL_FAIL"] = "ncclCommInitRankConfig:5"
    with contextlib.redirect_stderr(io.StringIO()) as said:
        parameters, by_nccl = train(number)
    assert not any(by_nccl), by_nccl
    why = "summed over gloo, through the hosts: NCCL could not connect rank 0, 1, 2: "
    assert why in said.getvalue(), said.getvalue()
    assert said.getvalue().count("over gloo") == 1, said.getvalue()
    return parameters


def insisting(number):
    """Who asks for NCCL does not get gloo without a word."""
    os.environ["FAKE_NCCL_FAIL"] = "ncclCommInitRankConfig:5"
    try:
        train(number, backend="nccl")
    except ValueError as error:
        assert "could not connect rank 0, 1, 2" in str(error) and "Without backend='nccl'" in str(error), error
    else:
        raise AssertionError("it continued over gloo")


def unlike(number):
    os.environ["FAKE_NCCL_VERSION"] = "22809" if number == 1 else "22907"
    with contextlib.redirect_stderr(io.StringIO()) as said:
        parameters, by_nccl = train(number)
    assert not any(by_nccl) and "22907 on rank 0, 22809 on rank 1" in said.getvalue(), said.getvalue()
    return parameters


def unasked(number):
    parameters, by_nccl = train(number, backend="gloo")
    assert not any(by_nccl), by_nccl
    return parameters


PLAYS = [
    undisturbed, cut_in_a_step, failing, hanging, cut_while_nccl_takes_a_sum, unconnected, insisting, unlike, unasked,
]  # fmt: skip


def rank(port, play, number):
    torch.set_num_threads(1)
    stand_in.install(sys.argv[2])
    # The plays have different rounds at the one store.
    ranks.Agent(port, number, SIZE, 1, first_round=100 * (1 + PLAYS.index(play)))
    parameters = play(number)
    if parameters is not None:
        ranks.alone()
        expected, _ = train(0)
        assert torch.allclose(parameters, expected, rtol=1e-9, atol=1e-9), (parameters - expected).abs().max()


def refused():
    """Without a GPU there is nothing that NCCL could sum."""
    model = torch.nn.Linear(1, 1)
    for backend, why in (("nccl", "on cpu"), ("mpi", "'mpi'")):
        of_session = model, torch.optim.SGD(model.parameters()), elastic.ElasticBatchSampler(3, 1)
        ranks.refused(why, lambda: elastic.Session(*of_session, backend=backend))


if __name__ == "__main__":
    refused()
    for one in PLAYS:
        print(one.__name__, flush=True)
        ranks.run(SIZE, lambda number: rank(int(sys.argv[1]), one, number))
