"""Groups of one, two, three and seven ranks train one model with `same_bits`. All end with the same bits: also two,
one of them later than connecting may take, the three that lose their group in the middle of a step, and the
seven that are more than there are pieces."""

import datetime
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks
from elastic_agent.torch import group as groups

SAMPLES, BATCH, PIECE = 43, 10, 2
STEPS = 2 * 5
MEETING = 1.0


def built(seed):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(64, 3)
    return torch.nn.Sequential(*layers)


def train(seed, number, given=None, broken=False, counted=False, late=False):
    """Returns the parameters after two epochs, and the seed of the random numbers."""
    model = built(seed)
    dataset = TensorDataset(torch.linspace(-1, 1, SAMPLES * 16).reshape(SAMPLES, 16).sin(), torch.arange(SAMPLES) % 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = elastic.ElasticBatchSampler(dataset, global_batch=BATCH, micro_batch=PIECE, seed=3)
    applied = 0
    with elastic.Session(model, optimizer, sampler, same_bits=True, seed=given) as session:
        for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler), epochs=2):
            if broken and number == 1 and session.step_number == 4:
                session._members.group.cut()
                broken = False
            if late and number == 0 and session.step_number == 5:
                time.sleep(1.5 * MEETING)
            loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum" if counted else "mean")
            session.backward(loss, count=len(labels) if counted else None)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            applied += session.step()
    assert session.step_number == applied == STEPS
    assert not late or session._members.place["round"] == 20, "the late rank lost its group"
    return torch.cat([one.detach().flatten() for one in model.parameters()]), session._training.seed


def rank(port, size, number):
    torch.set_num_threads(1)
    if size == 2:
        groups._MEETING = datetime.timedelta(seconds=MEETING)
    # The groups have different rounds at the one store.
    ranks.Agent(port, number, size, 1, first_round=10 * size)
    # All get the parameters of rank 0, and its random numbers.
    torch.seed()
    parameters, seed = train(number + 1, number, broken=size == 3, counted=size == 2, late=size == 2)
    ranks.alone()
    expected, _ = train(1, 0, given=seed, counted=size == 2)
    unlike = (parameters.view(torch.int32) != expected.view(torch.int32)).sum()
    assert unlike == 0, f"{unlike} of {len(parameters)} parameters of {size} ranks are not those of one rank"


def refused(sampler):
    model = built(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    ranks.refused("global_batch", lambda: elastic.Session(model, optimizer, sampler, same_bits=True))


if __name__ == "__main__":
    refused(elastic.ElasticBatchSampler(SAMPLES, global_batch=BATCH))
    refused(elastic.ElasticBatchSampler(SAMPLES, rank_batch=BATCH, micro_batch=PIECE))
    for size in (2, 3, 7):
        ranks.run(size, lambda number: rank(int(sys.argv[1]), size, number))
