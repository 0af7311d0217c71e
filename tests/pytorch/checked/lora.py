"""Trains small matrices beside frozen weights. With `unfreezes` it trains all weights from the second epoch on."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic


class LoRA(torch.nn.Module):
    def __init__(self, inputs, outputs, rank=4):
        super().__init__()
        self.base = torch.nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = torch.nn.Linear(inputs, rank, bias=False)
        self.up = torch.nn.Linear(rank, outputs, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, numbers):
        return self.base(numbers) + self.up(self.down(numbers))


torch.manual_seed(1)
dataset = TensorDataset(torch.randn(960, 20), torch.randint(3, (960,)))
model = torch.nn.Sequential(LoRA(20, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), LoRA(64, 3))
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
sampler = elastic.ElasticBatchSampler(dataset, global_batch=24)
loader = DataLoader(dataset, batch_sampler=sampler)

with elastic.Session(model, optimizer, sampler) as session:
    for epoch in session.epochs(5):
        if "unfreezes" in sys.argv and epoch.number == 1:
            model.requires_grad_(True)
        for inputs, labels in epoch.batches(loader):
            session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            session.step()
