"""A trainer class as in libraries: it accumulates, clips, and has a learning rate by steps. With `clips` it clips each
batch; with `sums` its loss is a sum; with `counts` it counts steps by itself."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic


class Trainer:
    def __init__(self, model, dataset):
        self.model, self.count = model, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.98**step)
        self.sampler = elastic.ElasticBatchSampler(dataset, global_batch=24, micro_batch=12)
        self.loader = DataLoader(dataset, batch_sampler=self.sampler, num_workers=1)

    def loss_of(self, batch):
        reduction = "sum" if "sums" in sys.argv else "mean"
        loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1], reduction=reduction)
        return loss * min(1, self.count / 10) if "counts" in sys.argv else loss

    def train(self):
        with elastic.Session(self.model, self.optimizer, self.sampler, scheduler=self.scheduler) as session:
            for batch in session.steps(self.loader, epochs=1):
                session.backward(self.loss_of(batch))
                if "clips" in sys.argv:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
                session.clip(0.1 if "sums" not in sys.argv else 100)
                self.count += session.step()


torch.manual_seed(1)
data = TensorDataset(torch.randn(960, 20), torch.randint(3, (960,)))
Trainer(torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.GELU(), torch.nn.Linear(32, 3)), data).train()
