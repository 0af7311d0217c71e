"""A script that trained by DistributedDataParallel. With `group` its group and wrapper are left in; with `unseeded` each
rank makes data of its own; with `steps` the optimizer's own step is left in."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic

if "unseeded" not in sys.argv:
    torch.manual_seed(1)
dataset = TensorDataset(torch.randn(960, 20), torch.randint(3, (960,)))
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
if "group" in sys.argv:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
sampler = elastic.ElasticBatchSampler(dataset, global_batch=24)
loader = DataLoader(dataset, batch_sampler=sampler)

with elastic.Session(model, optimizer, sampler) as session:
    for inputs, labels in session.steps(loader, epochs=5):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        session.backward(loss)
        if "steps" in sys.argv:
            optimizer.step()
        session.step()
