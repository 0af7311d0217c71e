"""Compiles its model before it has a place: with PyTorch's own kernels, as the others take minutes to compile."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic

torch.manual_seed(1)
dataset = TensorDataset(torch.randn(960, 20), torch.randint(3, (960,)))
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.GELU(), torch.nn.Linear(32, 3))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = elastic.ElasticBatchSampler(dataset, global_batch=24)
loader = DataLoader(dataset, batch_sampler=sampler)


def loss_of(inputs, labels):
    return torch.nn.functional.cross_entropy(compiled(inputs), labels)


session = elastic.Session(model, optimizer, sampler)
session.warm_up(lambda: loss_of(*dataset[:24]))
with session:
    for inputs, labels in session.steps(loader, epochs=5):
        session.backward(loss_of(inputs, labels))
        session.step()
