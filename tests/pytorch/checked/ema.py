"""Keeps an average of its model. With `outside` the session does not know of it."""

import sys

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic

torch.manual_seed(1)
dataset = TensorDataset(torch.randn(960, 20), torch.randn(960, 1))
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = elastic.ElasticBatchSampler(dataset, global_batch=24)
loader = DataLoader(dataset, batch_sampler=sampler)
state = None if "outside" in sys.argv else elastic.State(average=average)

with elastic.Session(model, optimizer, sampler, state=state) as session:
    for inputs, targets in session.steps(loader, epochs=5):
        session.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        if session.step():
            average.update_parameters(model)
