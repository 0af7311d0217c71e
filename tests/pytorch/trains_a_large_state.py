"""Trains a small part of a large model in a Session, and tells when each step was applied. It ends when the test says so,
soon after another node has joined."""

import os
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic

torch.set_num_threads(1)
torch.manual_seed(int(time.time()))
# 160 MB in all; most of it is frozen.
model = torch.nn.ModuleList([torch.nn.Linear(64, 10), *(torch.nn.Linear(2_000_000, 1, bias=False) for _ in range(20))])
model[1:].requires_grad_(False)
optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
sampler = elastic.ElasticBatchSampler(range(100_000), 20, seed=7)
with elastic.Session(model, optimizer, sampler) as session:
    # It needs the worker's place.
    import harness

    dataset = TensorDataset(torch.rand(100_000, 64))
    for (inputs,) in session.steps(DataLoader(dataset, batch_sampler=sampler), epochs=100):
        session.backward(model[0](inputs).square().mean())
        time.sleep(0.05)
        session.step()
        place = session._members.place
        harness.ROUND, harness.RANK, harness.WORLD_SIZE = place["round"], session.rank, session.world_size
        total = sum(float(one.detach().double().sum()) for one in model.parameters()) if harness.is_set("sum") else 0.0
        harness.trace("applied", step=session.step_number, pid=os.getpid(), at=time.monotonic(), sum=total)
        if session.agree(harness.is_set("end")):
            break
harness.exit_now()
