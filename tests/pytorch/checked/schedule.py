"""Its learning rate falls with each epoch, and it tests its model then. With `outside` the session does not know of the
scheduler; with `pauses` nor of the test; with `hangs` it does not end."""

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic

torch.manual_seed(1)
dataset = TensorDataset(torch.randn(960, 20), torch.randint(3, (960,)))
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
sampler = elastic.ElasticBatchSampler(dataset, global_batch=24)
loader = DataLoader(dataset, batch_sampler=sampler)
given = {} if "outside" in sys.argv else {"scheduler": scheduler, "scheduler_per": "epoch"}

with elastic.Session(model, optimizer, sampler, **given) as session:
    for epoch in session.epochs(5):
        for inputs, labels in epoch.batches(loader):
            session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            session.step()
        if "outside" in sys.argv:
            scheduler.step()
        if "pauses" in sys.argv:
            time.sleep(2)
        session.evaluate(DataLoader(dataset, batch_size=320), lambda batch: model(batch[0]).argmax(1).eq(batch[1]).sum())
while "hangs" in sys.argv:
    time.sleep(1)
