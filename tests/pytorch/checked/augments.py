"""Changes its samples at random. With `mixes` its loop draws numbers of its own; with `clock` always other ones."""

import random
import sys

import torch
from torch.utils.data import DataLoader, Dataset

import elastic_agent.torch as elastic


class Images(Dataset):
    def __init__(self):
        self.images, self.labels = torch.randn(960, 1, 8, 8), torch.randint(3, (960,))

    def __len__(self):
        return 960

    def __getitem__(self, number):
        image = self.images[number] + 0.1 * torch.randn(1, 8, 8)
        return image.flip(-1) if random.random() < 0.5 else image, self.labels[number]


torch.manual_seed(1)
dataset = Images()
model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
sampler = elastic.ElasticBatchSampler(dataset, global_batch=24)
loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
own = random.Random() if "clock" in sys.argv else random

with elastic.Session(model, optimizer, sampler) as session:
    for images, labels in session.steps(loader, epochs=5):
        if "mixes" in sys.argv or "clock" in sys.argv:
            images = images + own.random() * images.flip(0)
        session.backward(torch.nn.functional.cross_entropy(model(images), labels))
        session.step()
