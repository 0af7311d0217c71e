"""All that a script trains travels with its state: several optimizers, a GradScaler, an average of the model and values
of its own; a learning rate follows a metric on workers that join meanwhile; rows are gathered with their gradients; and a
loop of the script's own commits and restores. Each result is that of plain PyTorch in one process. What an agent says is
simulated."""

import pathlib
import sys
import tempfile
import time

import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks
from elastic_agent import worker
from elastic_agent.torch.group import GroupLost
from elastic_agent.torch.state import Training

SAMPLES, BATCH, EPOCHS = 24, 8, 4
loss_of = torch.nn.functional.mse_loss
inputs = torch.linspace(-3, 3, SAMPLES * 4).reshape(SAMPLES, 4).sin()
# PyTorch before 2.3 has no scaler for CPUs.
SCALES = hasattr(torch.amp, "GradScaler")
if SCALES:
    # In the part that rank 1 has of the second step.
    inputs[13, 2] = float("inf")
labels = inputs.nan_to_num(0, 1, -1).sum(1, keepdim=True).tanh()
clean = TensorDataset(inputs[:8], labels[:8])
ends = torch.zeros(2, 29, dtype=torch.float64).share_memory_()
looped = torch.zeros(2, 13, dtype=torch.float64).share_memory_()


class Trained:
    """What a script with everything has. Its learning rate is halved after each epoch that is not far better."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))
        first, second = (layer.parameters() for layer in self.model)
        self.optimizers = [torch.optim.AdamW(first, lr=0.05), torch.optim.SGD(second, lr=0.1, momentum=0.9)]
        reduce = torch.optim.lr_scheduler.ReduceLROnPlateau
        self.schedulers = [reduce(one, factor=0.5, patience=0, threshold=0.9) for one in self.optimizers]
        how = {"init_scale": 64.0, "growth_interval": 3}
        self.scaler = torch.amp.GradScaler("cpu", **how) if SCALES else torch.cuda.amp.GradScaler(enabled=False)
        self.ema = AveragedModel(self.model, avg_fn=lambda ema, new, _: 0.9 * ema + 0.1 * new)

    def end(self):
        scale, rates = self.scaler.get_scale(), [one.param_groups[0]["lr"] for one in self.optimizers]
        numbers = [one.double().flatten() for one in [*self.model.state_dict().values(), *self.ema.parameters()]]
        return torch.cat([*numbers, torch.tensor([scale, *rates], dtype=torch.float64)]).detach()


def plainly():
    """As in every script of one process."""
    it = Trained(0)
    for epoch in range(EPOCHS):
        for at in range(0, SAMPLES, BATCH):
            it.scaler.scale(loss_of(it.model(inputs[at : at + BATCH]), labels[at : at + BATCH])).backward()
            for one in it.optimizers:
                it.scaler.unscale_(one)
            torch.nn.utils.clip_grad_norm_(it.model.parameters(), 1.0)
            for one in it.optimizers:
                it.scaler.step(one)
                one.zero_grad()
            it.scaler.update()
            it.ema.update_parameters(it.model)
        with torch.no_grad():
            metric = float(loss_of(it.model(clean.tensors[0]), clean.tensors[1]))
        # The last epoch's has no step that follows it.
        for one in it.schedulers if epoch < EPOCHS - 1 else []:
            one.step(metric)
    return it.end()


def joins_later(agent, number):
    """Rank 0 is alone at first. Rank 1 has a place in the next round."""
    both = {**agent.place, "round": agent.place["round"] + 1}

    def quiesce(step):
        agent.place, worker.quiesce = both, agent.quiesce
        return both

    agent.place = both if number else {**agent.place, "world_size": 1}
    if number == 0:
        worker.quiesce = quiesce


def waits_for_the_other(agent, loop):
    """Rank 1 joins now, unless it is there."""
    if worker.quiesce != agent.quiesce:
        loop._members.group.cut()
    while worker.quiesce != agent.quiesce:
        time.sleep(0.01)


def everything(agent, number, joins, folder):
    """Rank 1 joins when the first epoch has ended: by its last step, or while it is evaluated. A peer is lost twice in
    the third one."""
    joins_later(agent, number)
    it = Trained(number)
    state = elastic.State(ema=it.ema, best=[9.0], seen=torch.zeros(1, dtype=torch.int64))
    sampler = elastic.ElasticBatchSampler(SAMPLES, BATCH, shuffle=False, micro_batch=BATCH)
    loader = DataLoader(TensorDataset(inputs, labels), batch_sampler=sampler)
    more = {"scheduler": it.schedulers, "scaler": it.scaler, "state": state, "loss_timeout": 0.1}
    lost = set()

    def loses(at):
        if session.step_number == at and at not in lost:
            lost.add(at)
            if number == 1:
                session._members.group.cut()
            assert session.mean(3.0 + number) == 3.0 + number

    def measure(batch):
        if joins == "meanwhile" and session.epoch == 1 and number == 0:
            waits_for_the_other(agent, session)
        return loss_of(it.model(batch[0]), batch[1], reduction="sum")

    with elastic.Session(it.model, it.optimizers, sampler, checkpoint_dir=folder, **more) as session:
        for epoch in session.epochs(EPOCHS):
            while session.epoch == epoch.number:
                for some, wanted in epoch.batches(loader):
                    last = session.step_number == SAMPLES // BATCH - 1 and joins == "at its end"
                    worker.forming = lambda: 1 if last else None
                    if session.step_number == 11 and number == 0 and 11 not in lost:
                        lost.add(11)
                        break
                    session.backward(loss_of(it.model(some), wanted))
                    session.clip(1.0)
                    # The other has left the loop: this rank asks no one.
                    assert not session._step.ended or session.mean(number) == number == 1
                    loses(7)
                    if session.step():
                        it.ema.update_parameters(it.model)
                        state.seen += 1
                        assert session.step_number != 9 or session.mean(number) == 0.5
                        loses(10)
                    worker.forming = lambda: None
            assert (session.world_size == 1) is (epoch.number == 0)
            with session.aside():
                ranks.refused("not in session.aside", lambda: session.mean(1), RuntimeError)
            total = session.evaluate(DataLoader(clean, batch_size=4, shuffle=False), measure)
            # Rank 1 may be in its first step.
            assert torch.allclose(session.evaluate(DataLoader(clean, batch_size=4, shuffle=False), measure), total)
            session.step_scheduler(total / len(clean))
            state.best = [min(state.best[0], float(total))]
        assert session.agree(f"of {number}") == "of 0" and int(state.seen) == session.step_number == 12
    ends[number] = it.end()


def saved(folder):
    (path,) = pathlib.Path(folder).glob("*.pt")
    value = torch.load(path, weights_only=True)
    assert value["step"] == 12 and value["scaler"].get("scale", 1.0) == ends[0][-3] and len(value["optimizer"]) == 2
    assert value["state"]["best"][0] < 9 and torch.equal(value["state"]["seen"], torch.tensor([12]))


def contrastive(micro_batch):
    """The loss compares each sample of a step with all others of it. The last step has one."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).double()
    rows = torch.linspace(-3, 3, 21 * 4, dtype=torch.float64).reshape(21, 4).sin()
    sampler = elastic.ElasticBatchSampler(21, 10, shuffle=False, micro_batch=micro_batch)
    with elastic.Session(model, torch.optim.SGD(model.parameters(), lr=0.5), sampler) as session:
        for (some,) in session.steps(DataLoader(TensorDataset(rows), batch_sampler=sampler), epochs=2):
            one, other = session.gather(model(some)), session.gather(model(some.cos()))
            session.backward(torch.nn.functional.cross_entropy(one @ other.T, torch.arange(len(one))))
            session.step()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


class Pair:
    """Two models. Each has the other's output in its loss."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.models = [torch.nn.Linear(4, 1).double(), torch.nn.Linear(1, 4).double()]
        self.optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in self.models]

    def learn(self, which, rows, mean_gradients):
        own, other = self.models if which == 0 else self.models[::-1]
        self.optimizers[which].zero_grad()
        first, second = self.models
        (loss_of(second(first(rows)), rows) + which * first(rows).square().mean()).backward()
        mean_gradients(own)
        self.optimizers[which].step()
        return loss_of(second(first(rows)), rows)

    def end(self):
        return torch.cat([one.detach().flatten() for model in self.models for one in model.parameters()])


def rows_of(step, rank, size):
    rows = torch.linspace(step, step + 9, 32, dtype=torch.float64).reshape(8, 4).sin()
    return rows[8 * rank // size : 8 * (rank + 1) // size]


def own_loop(agent, number):
    """Rank 1 joins after two steps. A peer is lost twice in the third one, when only one rank has committed the sixth,
    and in the seventh."""
    joins_later(agent, number)
    pair, fails, late = Pair(number), [2, 2, 6, None], [5] * number
    state = elastic.State(models=pair.models, optimizers=pair.optimizers, losses=[])
    with elastic.Loop(state, loss_timeout=0.1) as loop:
        ranks.refused("within `with loop.step()`", lambda: loop.mean(1), RuntimeError)
        vote = loop._vote

        def vote_and_lose(*does):
            votes = vote(*does)
            # The one at the end of the step.
            if late == [loop.step_number] and not does:
                late.clear()
                loop._members.group.cut()
                raise GroupLost("it comes too late")
            return votes

        loop._vote = vote_and_lose
        while loop.step_number < 8:
            worker.forming = lambda: 1 if loop.step_number == 1 else None
            with loop.step():
                rows = rows_of(loop.step_number, loop.rank, loop.world_size)
                pair.learn(0, rows, loop.mean_gradients)
                if loop.step_number == fails[0] and loop.world_size == 2:
                    fails.pop(0)
                    state.failed = True
                    if number == 1:
                        loop._members.group.cut()
                state.losses.append(loop.mean(pair.learn(1, rows, loop.mean_gradients)))
        assert len(state.losses) == 8 and not hasattr(state, "failed"), state.losses
        assert fails == [None] and not late
        with loop.aside():
            pass
        looped[number] = pair.end()
    state.losses.append(1)
    state.restore()
    assert len(state.losses) == 8
    worker.forming = lambda: None
    with elastic.Loop(elastic.State(models=pair.models)) as loop:
        for asks in (False, True):
            ranks.refused(" has left the loop", lambda: leave_apart(loop, number, asks), RuntimeError)
        loop._meet_at_the_end = lambda: None


def asides(agent, number, joins):
    """Rank 1 joins while rank 0 is aside, and is in its first step while rank 0 is so again; or the other way around; or
    it joins after a step of rank 0, which is aside then."""
    joins_later(agent, number)
    state = elastic.State(sum=0.0)
    with elastic.Loop(state, loss_timeout=0.1) as loop:
        if joins == "into its own":
            with loop.aside():
                time.sleep(0.3 * number)
        while loop.step_number < 4:
            worker.forming = lambda: 1 if loop.step_number == 1 and joins == "after a step" else None
            with loop.step():
                state.sum += loop.mean(1.0 + number)
            for _ in range(1 + (joins == "into the other's") if loop.step_number == 2 and number == 0 else 0):
                with loop.aside():
                    waits_for_the_other(agent, loop)
                    time.sleep(0.3)
        assert state.sum == 5.0, state.sum


def leave_apart(loop, number, asks):
    """While the other ends a step, or asks for a sum of another size than a vote's."""
    if number == 0:
        loop._meet_at_the_end()
    with loop.step():
        if asks:
            loop.all_reduce(torch.ones(1000))


def rank(port, number, folder):
    torch.set_num_threads(1)
    for at, joins in enumerate(("at its end", "meanwhile")):
        agent = ranks.Agent(port, number, 2, 1, first_round=1 + 20 * at)
        everything(agent, number, joins, folder if joins == "meanwhile" else None)
        assert torch.allclose(ends[number], plainly(), rtol=1e-4, atol=1e-5), (joins, number, ends[number], plainly())
    agent = ranks.Agent(port, number, 2, 1, first_round=50)
    both = contrastive(micro_batch=5)
    ranks.refused("in one batch", lambda: contrastive(micro_batch=3), RuntimeError)
    own_loop(ranks.Agent(port, number, 2, 1, first_round=60), number)
    for at, joins in enumerate(("into the other's", "into its own", "after a step")):
        asides(ranks.Agent(port, number, 2, 1, first_round=80 + 10 * at), number, joins)
    ranks.alone()
    alone = contrastive(micro_batch=10)
    assert torch.allclose(both, alone, rtol=1e-9), (both, alone)


def commits_frozen_weights_once():
    """Such as those beside LoRA's: again only when the script has changed them."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 2))
    model[0].requires_grad_(False)
    state = elastic.State(model=model, more=torch.zeros(3))
    state.commit()
    weight, _, trained, *_ = state._committed[1]
    for change, copied in ((0, False), (1, True), (0, False)):
        model[0].weight.data.add_(change)
        weight.fill_(7)
        trained.fill_(7)
        state.commit()
        assert torch.equal(weight, model[0].weight) is copied and torch.equal(trained, model[1].weight)
    state.commit()
    state.restore()
    assert (model[0].weight == 7).all()


def refusals():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks.refused("cannot have the name 'commit'", lambda: elastic.State(commit=1))
    short, long = elastic.State(a=1), elastic.State(a=1, optimizers=[optimizer])
    ranks.refused("has no 'optimizers'", lambda: long.load_state_dict(short.state_dict()))
    ranks.refused("another number of 'optimizers'", lambda: long.load_state_dict({"a": 2, "optimizers": []}))
    sampler = elastic.ElasticBatchSampler(8, 4)
    session = elastic.Session(model, optimizer, sampler)
    ranks.refused("ReduceLROnPlateau", lambda: session.step_scheduler(1.0))
    # If all ranks that have evaluated are lost before the next step.
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    first, second = (Training(model, optimizer, sampler, plateau) for _ in range(2))
    first.follow(2.0)
    second.load(first.value())
    assert second.metric == 2.0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ranks.run(2, lambda number: rank(int(sys.argv[1]), number, folder), seconds=100)
        saved(folder)
    assert torch.equal(looped[0], looped[1]), looped
    alone = Pair(0)
    for step in range(8):
        for which in (0, 1):
            alone.learn(which, rows_of(step, 0, 1), lambda model: None)
    assert torch.allclose(looped[0], alone.end(), rtol=1e-9), (looped[0], alone.end())
    commits_frozen_weights_once()
    refusals()
