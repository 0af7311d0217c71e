"""Streams of unknown lengths on one to three ranks: each sample belongs to one applied step of an epoch, whichever rank
dies, joins or starts again, and has the same random numbers. What an agent says is simulated."""

import collections
import itertools
import json
import os
import pathlib
import random
import sys
import tempfile

import torch
from torch.utils.data import DataLoader, IterableDataset

import elastic_agent.torch as elastic
import ranks
from elastic_agent import worker

LENGTHS = {"a": 7, "empty": 0, "b": 13, "c": 5, "d": 1, "e": 22, "f": 9}
NUMBER = {name: number for number, name in enumerate(LENGTHS)}
EPOCHS, BATCH, DIES_AT, JOINS_AT, STOPS_AT = 2, 3, 4, 3, 5
EVERY = [(epoch, name, at) for epoch in range(EPOCHS) for name, length in LENGTHS.items() for at in range(length)]
rounds, folder = itertools.count(1, 100), pathlib.Path()


def note(**facts):
    file = os.open(folder / "lines", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, json.dumps(facts).encode() + b"\n")
    os.close(file)


def read(name, at):
    """A sample: what it is, and what is drawn for it."""
    note(read=[name, at])
    return torch.tensor([NUMBER[name], at], dtype=torch.float64), random.random() + torch.rand(()).item()


def plain(name):
    return (read(name, at) for at in range(LENGTHS[name]))


class Keeps:
    """It knows where it is. Its first samples are not read again."""

    def __init__(self, name):
        self.name, self.at = name, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == LENGTHS[self.name]:
            raise StopIteration
        self.at += 1
        return read(self.name, self.at - 1)

    def state_dict(self):
        return {"at": (self.at,)}

    def load_state_dict(self, state):
        (self.at,) = state["at"]


class Kept(IterableDataset):
    def __init__(self, name):
        self.name = name

    def __iter__(self):
        return plain(self.name)


def by_processes(name):
    """A loader of one source."""
    return DataLoader(Kept(name), batch_size=None, num_workers=1)


def train(number, kind=plain, event=lambda session, point: None, stop=None, local_steps=None, saves=None, **how):
    torch.manual_seed(number)
    model = torch.nn.Linear(2, 1, bias=False).double()
    streams = elastic.Streams(list(LENGTHS), kind, seed=2, **(how or {"rank_batch": BATCH}))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    more = {"seed": 1, "loss_timeout": 0.1, "checkpoint_dir": saves, "local_steps": local_steps}
    with elastic.Session(model, optimizer, streams, **more) as session:
        own = []
        for ids, drawn in session.steps(streams, epochs=EPOCHS):
            step, size = session._step, session._step.batches[session._step.done]
            assert size in (0, len(ids))
            own = [*(own if step.done else []), *ids[:size]]
            place = {"step": session.step_number, "round": session._members.place["round"]}
            note(epoch=session.epoch, ids=ids[:size].tolist(), drawn=drawn[:size].tolist(), **place)
            event(session, "batch")
            session.backward(model(ids).mean())
            if session.step_is_complete:
                event(session, "sum")
                mean = session.mean(torch.stack(own).mean(0) if own else torch.zeros(2), len(own))
                assert step.lost or local_steps or torch.allclose(model.weight.grad[0], mean, rtol=1e-12), (model.weight.grad, mean)
            if session.step():
                note(applied=place["step"], round=place["round"])
                event(session, "step")
                if session.step_number == stop:
                    break
        return session.epoch


def cut_everywhere(number):
    """Rank 1 loses its connections at each point of some steps."""
    left = {(at, point) for at in (0, 2, 3, 7) for point in ("batch", "sum", "step")}

    def event(session, point):
        if number == 1 and (session.step_number, point) in left:
            left.remove((session.step_number, point))
            session._members.group.cut()

    return event


def dies(number, at, after):
    """The last of three ranks dies."""

    def event(session, point):
        if (number, session.step_number, point) == (2, at + (after == "step"), after):
            os._exit(0)

    return event


def joins(agent, number):
    """Rank 1 has a place in the second round."""
    both = {**agent.place, "round": agent.place["round"] + 1}
    agent.place = both if number else {**agent.place, "world_size": 1}
    worker.quiesce = lambda step: both

    def event(session, point):
        worker.forming = lambda: 1 if session.step_number >= JOINS_AT and session.world_size == 1 else None

    return event


def agent_of(port, number, size, round_):
    torch.set_num_threads(1)
    agent = ranks.Agent(port, number, size, 1, first_round=round_)
    worker.commit_checkpoint = lambda step, path, **_: note(saved=[step, str(path)])
    return agent


def lines(word):
    told = map(json.loads, (folder / "lines").read_text().splitlines())
    return [one for one in told if word in one]


def seen():
    """Sees that each sample was used once by the applied steps. Returns what was drawn for each, and the reads beyond
    one."""
    applied = {one["applied"]: one["round"] for one in lines("applied")}
    drawn = {}
    for one in lines("ids"):
        if applied.get(one["step"]) == one["round"]:
            for (number, at), draw in zip(one["ids"], one["drawn"]):
                key = one["epoch"], [*LENGTHS][int(number)], int(at)
                assert key not in drawn, f"{key} was used twice"
                drawn[key] = draw
    assert sorted(drawn) == sorted(EVERY), set(EVERY) - drawn.keys()
    reads = collections.Counter(tuple(one["read"]) for one in lines("read"))
    (folder / "lines").unlink()
    return drawn, {one: count - EPOCHS for one, count in reads.items() if count != EPOCHS}


def scenario(port, size, rank, seconds=60):
    round_ = next(rounds)
    ranks.run(size, lambda number: rank(agent_of(port, number, size, round_), number), seconds)


def checkpointed(port):
    """Another group continues from a checkpoint within an epoch."""
    saves = folder / "saves"
    saves.mkdir()
    scenario(port, 3, lambda agent, number: train(number, stop=STOPS_AT, saves=saves))
    ((step, path),) = [one["saved"] for one in lines("saved")]
    assert step == STOPS_AT

    def resumes(agent, number):
        agent.place["checkpoint"] = {"step": step, "path": path, "digest": worker.digest_of(pathlib.Path(path))}
        train(number)

    scenario(port, 2, resumes)


def shrinks(agent, number, at, after, kind):
    """Three ranks, and one dies."""
    worker.quiesce = lambda step: {**agent.quiesce(step), "world_size": 2}
    train(number, kind, dies(number, at, after))


def all_scenarios(port):
    scenario(port, 1, lambda agent, number: train(number))
    reference, again = seen()
    assert not again and len(set(reference.values())) == len(EVERY), again
    sizes = {"rank_batch": 5}, {"global_batch": 7, "micro_batch": 2}, {"rank_batch": 3, "lanes": 2}, {"global_batch": 1}
    for how in sizes:
        for kind in (plain, Keeps):
            scenario(port, 2, lambda agent, number: train(number, kind, **how))
            drawn, again = seen()
            assert drawn == reference and not again, (how, again)
    # What a rank has read of a step that is done again, it need not read again.
    scenario(port, 2, lambda agent, number: cuts(number))
    drawn, again = seen()
    assert drawn == reference and not again, again
    # Where several steps are done again, it must.
    scenario(port, 2, lambda agent, number: cuts(number, local_steps=4))
    assert seen()[0] == reference
    for after, kind in itertools.product(("batch", "sum", "step"), (plain, Keeps)):
        scenario(port, 3, lambda agent, number: shrinks(agent, number, DIES_AT, after, kind))
        drawn, again = seen()
        assert drawn == reference, after
        # The batch of the rank that died, and the sample after it.
        assert kind is plain or (max(again.values()) == 1 and len(again) <= BATCH + 1), (after, again)
    scenario(port, 2, lambda agent, number: train(number, event=joins(agent, number)))
    assert seen()[0] == reference
    checkpointed(port)
    assert seen()[0] == reference


def cuts(number, **how):
    assert train(number, event=cut_everywhere(number), **how) == EPOCHS


def of_processes(port):
    """Processes of a loader read each source. What they draw is theirs."""
    scenario(port, 2, lambda agent, number: train(number, by_processes))
    seen()


def alone(sources, open, **how):
    """All samples of an epoch of one rank."""
    model = torch.nn.Linear(1, 1, bias=False)
    streams = elastic.Streams(sources, open, **{"rank_batch": 4, "shuffle": False, **how})
    with elastic.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), streams) as session:
        for rows in session.steps(streams):
            session.backward(model(rows).mean())
            session.step()
        return session.step_number, streams.state_dict()


class Large(Keeps):
    def state_dict(self):
        return {"at": torch.ones(1)}


def fails(name):
    yield torch.ones(1)
    raise OSError(f"{name} is torn")


def refusals():
    files = {"one": 5, "two": 3}

    def opened(name):
        return iter(torch.ones(files[name], 1)) if name in files else open(name)

    assert alone(["one", "two"], opened)[0] == 2
    missing = "the source '/no/file' does not open: FileNotFoundError"
    ranks.refused(missing, lambda: alone(["one", "/no/file"], opened), RuntimeError)
    ranks.refused("the source 'x' fails after 1 samples: OSError: x is torn", lambda: alone(["x"], fails), RuntimeError)
    ranks.refused("none of the 2 sources has a sample", lambda: alone(["x", "y"], lambda name: []))
    ranks.refused("the position in the source 'b' has a tensor", lambda: alone(["b"], Large), TypeError)
    ranks.refused("give rank_batch", lambda: elastic.Streams(["a"], plain))
    ranks.refused("there are no sources", lambda: elastic.Streams([], plain, 3))
    three, model = elastic.Streams(["a", "b", "c"], plain, 3), torch.nn.Linear(1, 1)
    ranks.refused("sources 2, here it is 3", lambda: three.load_state_dict(alone(["one", "two"], opened)[1]))
    session = elastic.Session(model, torch.optim.SGD(model.parameters()), three)
    ranks.refused("return a DataLoader of one source", lambda: next(session.steps(DataLoader(three))))
    norm = torch.nn.Sequential(model, torch.nn.BatchNorm1d(1))
    ranks.refused("'1' is a BatchNorm1d", lambda: elastic.Session(norm, torch.optim.SGD(norm.parameters()), three))
    # What a source gives must be the same whenever it is opened.
    three.read_for("")
    three.load_state_dict({**three.state_dict(), "before": 3, "at": [[0, 1, [99, 99, None]]]})
    ranks.refused("and had 99 before", three.micro_batches, RuntimeError)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        all_scenarios(int(sys.argv[1]))
        of_processes(int(sys.argv[1]))
    ranks.alone()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        refusals()
