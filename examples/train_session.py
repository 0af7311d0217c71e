"""Trains a small network in a process that outlives changes of its group: when a node is lost, the others continue in
milliseconds; a node that joins gets the model from them. It runs alone, too: python3 train_session.py"""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--checkpoints", help="a folder that all nodes share, for when all of them are lost at once")
arguments = parser.parse_args()

# Represents data of your own: points of three classes, around a centre each.
torch.manual_seed(1)
labels = torch.randint(3, (3_000,))
dataset = TensorDataset(torch.randn(3_000, 20) + torch.randn(3, 20)[labels], labels)

model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = elastic.ElasticBatchSampler(dataset, global_batch=96, seed=1)
loader = DataLoader(dataset, batch_sampler=sampler)

with elastic.Session(model, optimizer, sampler, checkpoint_dir=arguments.checkpoints, checkpoint_every=100) as session:
    for inputs, classes in session.steps(loader, epochs=arguments.epochs):
        loss = torch.nn.functional.cross_entropy(model(inputs), classes)
        session.backward(loss)
        if session.step() and session.step_number % 50 == 0 and session.rank == 0:
            print(f"step {session.step_number}, {session.world_size} workers: loss {loss.item():.4f}", flush=True)
