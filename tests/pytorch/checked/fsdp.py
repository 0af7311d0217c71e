"""Shards its model over the workers of a node. With `plain` it shards it over all workers of the job."""

import os
import sys

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic

torch.manual_seed(1)
dataset = TensorDataset(torch.randn(960, 20), torch.randint(3, (960,)))
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.GELU(), torch.nn.Linear(32, 3))
if "plain" in sys.argv:
    mesh = torch.distributed.init_device_mesh("cpu", (int(os.environ.get("WORLD_SIZE", 1)),))
else:
    mesh = elastic.node_mesh()
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = elastic.ElasticBatchSampler(dataset, global_batch=24)

with elastic.Session(model, optimizer, sampler) as session:
    for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler), epochs=5):
        session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
        session.clip(1.0)
        session.step()
