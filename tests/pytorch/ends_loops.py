"""What ranks do after the last step of an epoch is the same on all, or each does it by itself: as they leave and join
with that step, as one of them loses it, and as one leaves the loop there. What an agent says is simulated."""

import os
import signal
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks
from elastic_agent import worker
from elastic_agent.torch.group import GroupLost

SAMPLES, BATCH, EPOCHS = 24, 12, 3
inputs = torch.linspace(-3, 3, SAMPLES * 4, dtype=torch.float64).reshape(SAMPLES, 4).sin()
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
# The parameters of each rank in the end, for each way in which the first epoch ends.
ends = torch.zeros(6, 4, 5, dtype=torch.float64).share_memory_()


# For each way the ranks in the first round, and in the next.
WAYS = {
    "nothing happens": ((0, 1), (0, 1)),
    "one leaves": ((0, 1, 2), (0, 1)),
    "one leaves and one joins": ((0, 1, 2), (0, 1, 3)),
    "one loses the step": ((0, 1), (0, 1)),
    "one breaks": ((0, 1), (0, 1)),
    "one leaves, one joins, one breaks": ((0, 1, 2), (0, 1, 3)),
}


def place_among(agent, number, first, later):
    """This rank's first place, and the next one. The last of them all has only that."""
    place, at = agent.place, int(number not in first)

    def in_round(at):
        among = later if at else first
        return {"round": place["round"] + at, "rank": among.index(number), "world_size": len(among)}

    def quiesce(step):
        agent.place = {**place, **in_round(1), "round": agent.place["round"] + 1}
        return agent.place

    agent.place, worker.quiesce = {**place, **in_round(at)}, quiesce


def train(agent, number, way):
    first, later = WAYS[way]
    if number not in (*first, *later):
        return
    begin = agent.place["round"]
    place_among(agent, number, first, later)
    torch.manual_seed(number)
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler, last = elastic.ElasticBatchSampler(data, BATCH, seed=3), SAMPLES // BATCH
    loader, test, read = DataLoader(data, batch_sampler=sampler), DataLoader(data, batch_size=4), []

    def measure(batch):
        read.append(len(batch[0]))
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")

    with elastic.Session(model, optimizer, sampler, loss_timeout=0.1) as session:
        for epoch in session.epochs(EPOCHS):
            for some, wanted in epoch.batches(loader):
                here = session.step_number == last - 1 and session._members.place["round"] == begin
                if here and number not in later:
                    os.kill(os.getpid(), signal.SIGTERM)
                worker.forming = lambda: 2 if here and 3 in later else None
                if here and "loses" in way and number == 1:
                    lose_the_end(session)
                session.backward(torch.nn.functional.mse_loss(model(some), wanted))
                session.step()
                worker.forming = lambda: None
                if "breaks" in way and session.step_number == last and number == 0:
                    break
            read.clear()
            total, samples = session.evaluate(test, measure), sum(read)
            with torch.no_grad():
                assert torch.allclose(total, measure(data.tensors))
            if epoch.number > 0 or not ("joins" in way or "loses" in way):
                # All of them are at the same place: they divide the samples, and can ask each other.
                assert samples < SAMPLES, (number, epoch.number, samples)
                assert session.mean(float(session.rank)) == (len(later) - 1) / 2
    assert session.step_number == EPOCHS * last
    ends[list(WAYS).index(way), number] = torch.cat([one.detach().flatten() for one in model.parameters()])


def lose_the_end(session):
    """This rank does not hear of the step that the others do."""
    finish = session._gradients.finish

    def loses():
        session._gradients.finish = finish
        finish()
        raise GroupLost("it hears of nothing")

    session._gradients.finish = loses


def rank(port, at, number):
    torch.set_num_threads(1)
    agent = ranks.Agent(port, number, 4, 1, first_round=1 + 20 * at)
    try:
        train(agent, number, list(WAYS)[at])
    except SystemExit as end:
        assert number == 2 and end.code == 128 + signal.SIGTERM, (number, end.code)


if __name__ == "__main__":
    for at, way in enumerate(WAYS):
        print(f"with the last step of the first epoch {way}", flush=True)
        ranks.run(4, lambda number: rank(int(sys.argv[1]), at, number))
        # The steps are the same.
        there = ends[at][(ends[at] != 0).any(1)]
        assert len(there) >= 2 and torch.allclose(there, ends[0, 0], rtol=1e-9), (way, ends[at])
