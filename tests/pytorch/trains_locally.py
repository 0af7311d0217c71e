"""Steps without a sum of gradients, on one to three ranks: the result is that of the algorithm in one process, whichever
rank is lost, joins or leaves. What an agent says is simulated."""

import collections
import itertools
import os
import pathlib
import sys
import tempfile

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks
from elastic_agent import worker
from elastic_agent.torch.group import GroupLost

SAMPLES, BATCH, EPOCHS, STEPS = 46, 8, 3, 4
# Six steps an epoch: after these there is an outer step.
OUTER = {4, 6, 8, 12, 16, 18}
rows = torch.linspace(-3, 3, SAMPLES * 4, dtype=torch.float64).reshape(SAMPLES, 4).sin()
wanted = rows.sum(1, keepdim=True).tanh()
loss_of = torch.nn.functional.mse_loss
rounds = itertools.count(1, 100)
ends = torch.zeros(3, 13, dtype=torch.float64).share_memory_()


class Trained:
    """What one rank has. Two layers have optimizers of their own."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)).double()
        first, second = self.model[0].parameters(), self.model[2].parameters()
        self.optimizers = [torch.optim.AdamW(first, lr=0.05), torch.optim.SGD(second, lr=0.1, momentum=0.9)]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, gamma=0.9) for one in self.optimizers]

    def step(self, samples):
        loss_of(self.model(rows[samples]), wanted[samples]).backward()
        for one in self.optimizers:
            one.step()
            one.zero_grad()
        self.schedule()

    def schedule(self):
        for one in self.schedulers:
            one.step()

    def end(self):
        return torch.cat([one.detach().flatten() for one in self.model.parameters()])


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def simulated(outer, size_of, more=()):
    """The algorithm. size_of: the number of ranks in a step. more: steps that an outer step follows, besides."""
    sampler, common = elastic.ElasticBatchSampler(SAMPLES, BATCH, seed=3), Trained(0)
    optimizer = outer(list(common.model.parameters())) if outer else None
    every = []
    for number in range(EPOCHS * 6):
        while len(every) < size_of(number):
            # A newcomer's optimizers begin with nothing but the learning rate.
            every.append(Trained(0))
            every[-1].model.load_state_dict(common.model.state_dict())
            for one, first in zip(every[-1].schedulers, every[0].schedulers):
                one.load_state_dict(first.state_dict())
                one.optimizer.param_groups[0]["lr"] = first.optimizer.param_groups[0]["lr"]
        del every[size_of(number) :]
        for rank, one in enumerate(every):
            sampler.set_place(rank, len(every))
            sampler.micro_batch = BATCH
            one.step(next(iter(sampler)))
        sampler.advance()
        if number + 1 in OUTER | set(more):
            for at, parameter in enumerate(common.model.parameters()):
                others = torch.stack([[*one.model.parameters()][at].detach() for one in every])
                parameter.grad = parameter.detach() - others.mean(0)
            with torch.no_grad():
                if optimizer:
                    optimizer.step()
                else:
                    for parameter in common.model.parameters():
                        parameter -= parameter.grad
            for one in every:
                one.model.load_state_dict(common.model.state_dict())
    return common.end()


def train(number, outer=nesterov, event=lambda session, point: None, micro_batch=BATCH, stop=None, **more):
    it, reported, done = Trained(number), [], 0
    worker.report_progress = lambda step, **_: reported.append(step)
    sampler = elastic.ElasticBatchSampler(SAMPLES, BATCH, seed=3, micro_batch=micro_batch)
    loader = DataLoader(TensorDataset(rows, wanted), batch_sampler=sampler)
    how = {"scheduler": it.schedulers, "local_steps": STEPS, "outer": outer, "loss_timeout": 0.1, **more}
    with elastic.Session(it.model, it.optimizers, sampler, **how) as session:
        for some, labels in session.steps(loader, epochs=EPOCHS):
            event(session, "batch")
            session.backward(loss_of(it.model(some), labels))
            if session.step_is_complete:
                event(session, "sum")
            if session.step():
                done += 1
                assert session.in_sync is (session.step_number in reported[-1:])
                event(session, "step")
            if session.step_number == stop:
                break
    ends[number] = it.end()
    return session.step_number, reported, done


def agent_of(port, number, size, round_):
    torch.set_num_threads(1)
    agent = ranks.Agent(port, number, size, 1, first_round=round_)
    worker.commit_checkpoint = lambda *_, **__: None
    return agent


def scenario(port, size, rank):
    """Returns the parameters, which are the same on all ranks that are left."""
    round_ = next(rounds)
    ends.zero_()
    ranks.run(size, lambda number: rank(agent_of(port, number, size, round_), number), seconds=60)
    left = [one for one in ends if one.any()]
    assert left and all(torch.equal(one, left[0]) for one in left), ends
    return left[0]


def right(here, there):
    assert torch.allclose(here, there, rtol=1e-9), (here, there)


def undisturbed(number, outer, micro_batch):
    step, reported, done = train(number, outer, micro_batch=micro_batch)
    assert (step, reported, done) == (EPOCHS * 6, sorted(OUTER), EPOCHS * 6), (step, reported, done)


def loses(number, too_late):
    """Rank 1 loses its connections in inner steps, and in an outer one before its sum. too_late: also rank 0, when only
    the other one has done it."""
    left = [(1, "batch"), (2, "sum"), (3, "step"), (5, "batch"), (9, "step"), (13, "sum")] * number
    late = {0: [7, 11][: 1 + too_late], 1: [3]}[number]

    def event(session, point):
        if (session.step_number, point) in left:
            left.remove((session.step_number, point))
            session._members.group.cut()
        vars(session._sameness).pop("compare", None)
        # In the outer step that follows this inner one.
        if late and point == "sum" and session.step_number == late[0]:
            at, group = late.pop(0), session._members.group
            if at == 11:
                session._sameness.compare = lambda *_, **__: loses_now(group)
            else:
                group.start_sum = lambda _: loses_now(group)

    def loses_now(group):
        group.cut()
        raise GroupLost("it comes too late")

    step, reported, _ = train(number, event=event)
    # Rank 0 has the parameters after the twelfth step from the other then.
    expected = sorted(OUTER - {12} if too_late and number == 0 else OUTER)
    assert (step, reported, left, late) == (EPOCHS * 6, expected, [], []), (step, reported, left, late)


def dies(agent, number):
    """The last of three ranks dies in the midst of inner steps: all begin again after the fourth."""
    worker.quiesce = lambda step: {**agent.quiesce(step), "world_size": 2}

    def event(session, point):
        if (number, session.step_number, point) == (2, 5, "sum"):
            os._exit(0)

    assert train(number, event=event)[0] == EPOCHS * 6


def joins(agent, number):
    """Rank 1 comes in the tenth step, after which there is an outer one."""
    both = {**agent.place, "round": agent.place["round"] + 1}
    agent.place = both if number else {**agent.place, "world_size": 1}
    worker.quiesce = lambda step: both

    def event(session, point):
        worker.forming = lambda: 1 if session.step_number == 9 and session.world_size == 1 else None

    _, reported, done = train(number, event=event)
    assert reported == sorted(one for one in OUTER | {10} if one > 10 * number) and done == EPOCHS * 6 - 10 * number


def leaves(agent, number):
    """Rank 1 is asked to leave after nine steps, and does so after another one."""
    worker.quiesce = lambda step: {**agent.quiesce(step), "world_size": 1}

    def event(session, point):
        if (number, session.step_number, point) == (1, 9, "step"):
            session._members.departure.asked = True

    try:
        train(number, event=event)
    except SystemExit as end:
        assert number == 1 and end.code == 143
    else:
        assert number == 0


def between(number):
    """What all ranks do with one model they do after an outer step; and who leaves the loop before is there again."""

    def event(session, point):
        if point == "step":
            assert session.mean(number) == 0.5
        if point == "step" and not session.in_sync:
            ranks.refused("when session.in_sync is true", lambda: session.aside().__enter__(), RuntimeError)

    step, reported, done = train(number, event=event, stop=11)
    assert (step, reported, done) == (8, [4, 6, 8], 11), (step, reported, done)


def from_a_checkpoint(port, folder):
    """Of the eighth step, with optimizers that begin again."""
    saved = collections.deque()

    def saves(agent, number):
        worker.commit_checkpoint = lambda step, path, **_: saved.append(step)
        train(number, checkpoint_dir=folder, checkpoint_every=5, keep_checkpoints=9)
        assert number or list(saved) == [6, 8, 12, 16, 18], saved

    scenario(port, 2, saves)
    (path,) = pathlib.Path(folder).glob("step-*12-*.pt")
    value = torch.load(path, weights_only=True)
    assert [one["state"] for one in value["optimizer"]] == [{}, {}] and len(value["outer"]["state"]) == 4
    where = {"step": 12, "path": str(path), "digest": worker.digest_of(path)}

    def resumes(agent, number):
        agent.place["checkpoint"] = where
        _, reported, done = train(number)
        assert (reported, done) == ([16, 18], 6)

    scenario(port, 2, resumes)


def all_scenarios(port):
    two = simulated(nesterov, lambda step: 2)
    right(scenario(port, 2, lambda agent, number: undisturbed(number, nesterov, BATCH)), two)
    right(scenario(port, 2, lambda agent, number: undisturbed(number, nesterov, 3)), two)
    right(scenario(port, 2, lambda agent, number: undisturbed(number, None, BATCH)), simulated(None, lambda step: 2))
    right(scenario(port, 2, lambda agent, number: loses(number, too_late=False)), two)
    scenario(port, 2, lambda agent, number: loses(number, too_late=True))
    right(scenario(port, 3, dies), simulated(nesterov, lambda step: 3 if step < 4 else 2))
    right(scenario(port, 2, joins), simulated(nesterov, lambda step: 1 + (step >= 10), more=[10]))
    right(scenario(port, 2, leaves), simulated(nesterov, lambda step: 1 + (step < 10), more=[10]))
    scenario(port, 2, lambda agent, number: between(number))
    with tempfile.TemporaryDirectory() as folder:
        from_a_checkpoint(port, folder)


def refusals():
    it, sampler = Trained(0), elastic.ElasticBatchSampler(SAMPLES, BATCH, micro_batch=4)

    def session(**how):
        elastic.Session(it.model, it.optimizers, sampler, **how)

    ranks.refused("an outer optimizer needs local_steps", lambda: session(outer=nesterov))
    ranks.refused("local_steps is 1 or more", lambda: session(local_steps=0))
    ranks.refused("nor with a GradScaler or same_bits", lambda: session(local_steps=4, same_bits=True))


if __name__ == "__main__":
    all_scenarios(int(sys.argv[1]))
    refusals()
