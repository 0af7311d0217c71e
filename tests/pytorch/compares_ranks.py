"""Three ranks train one model, and one of them changes what it has: a parameter, the optimizer's state, a learning rate.
All then end, by a line that names the rank and what differs. Where only the last bits differ, all take those of one rank.
What an agent says is simulated."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks
from elastic_agent.torch import sameness, tree

RANKS, SAMPLES, BATCH, STEPS = 3, 60, 6, 10
# The parameters that each rank has in the end.
ends = torch.zeros(RANKS, 26).share_memory_()


def built(layer=torch.nn.Linear):
    torch.manual_seed(0)
    return torch.nn.Sequential(layer(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1, bias=False), torch.nn.Linear(1, 1))


class Noisy(torch.optim.SGD):
    """Adds noise to each step, as differential privacy does."""

    def step(self):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.data += 0.01 * torch.randn_like(parameter)


def train(number, spoil=None, optimizer=torch.optim.Adam, broken=1):
    """Returns why it ended, and after how many steps."""
    model = built()
    optimizer = optimizer(model.parameters(), lr=0.01)
    inputs = torch.linspace(-1, 1, SAMPLES * 4).reshape(SAMPLES, 4).sin()
    dataset = TensorDataset(inputs, torch.arange(SAMPLES) % 2.0)
    sampler = elastic.ElasticBatchSampler(dataset, BATCH)
    session = elastic.Session(model, optimizer, sampler)
    try:
        with session:
            for some, wanted in session.steps(DataLoader(dataset, batch_sampler=sampler)):
                session.backward((model(some).squeeze(1) - wanted).square().mean())
                if session.step() and session.step_number == 3 and number == broken and spoil:
                    with torch.no_grad():
                        spoil(model, optimizer)
    except SystemExit as end:
        return str(end.code), session.step_number
    ends[number] = torch.cat([one.detach().flatten() for one in model.parameters()])
    return None, session.step_number


def change_a_weight(model, optimizer):
    model[2].weight[0, 3] += 0.01


def change_another_weight(model, optimizer):
    model[0].weight[0, 0] += 0.01


def change_a_moment(model, optimizer):
    optimizer.state[model[0].weight]["exp_avg_sq"] *= 1.01


def change_the_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.0101


def forget_a_state(model, optimizer):
    optimizer.state[model[3].weight].clear()


def change_last_bits(model, optimizer):
    model[0].weight.copy_(torch.nextafter(model[0].weight, torch.tensor(torch.inf)))


def rank(port, number):
    torch.set_num_threads(1)
    agent = ranks.Agent(port, number, RANKS, 1)
    for spoil, found in [
        (change_a_weight, "the parameter '2.weight' on rank 1 differs from that on rank 0 by"),
        (change_a_moment, "the optimizer's 'exp_avg_sq' of '0.weight' on rank 1 differs from that on rank 0 by 1.0e-02"),
        (change_the_rate, "lr of the optimizer's group 0 is 0.01 on rank 0, and 0.0101 on rank 1"),
        (forget_a_state, "the optimizer's 'exp_avg' of '3.weight' is 1 numbers of torch.float32 on rank 0, and missing"),
    ]:
        why, step = train(number, spoil)
        assert step == 3 and "after step 3:" in why and "Most ranks agree with rank 0." in why and found in why, why
        agent.place = {**agent.place, "round": agent.place["round"] + 1}
    # With small parts each step compares one of several: in turn all.
    sameness._LEAST = 8
    why, step = train(number, change_another_weight, broken=0)
    assert step == 6 and "agree with rank 1" in why and "'0.weight' on rank 0 differs" in why, (step, why)
    agent.place = {**agent.place, "round": agent.place["round"] + 1}
    assert train(number, change_last_bits) == (None, STEPS)
    assert train(number, optimizer=Noisy) == (None, STEPS)


def decisions():
    assert sameness.cut([]) == [[]]
    for sizes in ([1], [5, 0, 3], [100_000, 7, 100_000], [3_000_001] * 2):
        parts = sameness.cut(sizes)
        assert len(parts) <= sameness._TURNS + 1
        for number, size in enumerate(sizes):
            runs = [(first, end) for part in parts for one, first, end in part if one == number]
            assert [0, *(end for _, end in runs)] == [*(first for first, _ in runs), size], (sizes, runs)
            assert all(first % 8 == 0 for first, _ in runs)
    assert sameness.reference([5, 7, 7]) == 1 and sameness.reference([5, 7]) == 0
    text = sameness.complaint(["x by 1"], [5, 7], 0, 3, ["a", "b"])
    assert "No majority" in text and "not alike: rank 0: a; rank 1: b" in text, text
    # Whatever the place in memory, equal numbers have one mark.
    numbers = torch.arange(9, dtype=torch.float32)
    assert tree.sum_of_bits(numbers[1:9]) == tree.sum_of_bits(numbers[1:9].clone())


if __name__ == "__main__":
    decisions()
    ranks.run(RANKS, lambda number: rank(int(sys.argv[1]), number))
    assert ends.any() and all(torch.equal(one, ends[0]) for one in ends), ends
