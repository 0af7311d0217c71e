"""Distributed data parallel training whose last step is never lost with its workers: each step is copied into the agent's
memory, and every worker that is started again continues from there.

    elastic-agent --standalone --nproc-per-node=2 --max-restarts=3 train_snapshots.py
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent
import elastic_agent.torch as elastic

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--checkpoints", help="a folder that all nodes share, for when all agents are gone, too")
options = parser.parse_args()

dist.init_process_group("gloo")
# Represents data of your own: points of three classes, around a centre each.
torch.manual_seed(1)
labels = torch.randint(3, (3_000,))
dataset = TensorDataset(torch.randn(3_000, 20) + torch.randn(3, 20)[labels], labels)

model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
trained = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = elastic_agent.ElasticSampler(dataset, seed=1, drop_last=True)

parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
snapshots = elastic.Snapshots(parts, checkpoint_dir=options.checkpoints)
resumed = snapshots.resume()
step, first = (resumed.step, resumed.more["epoch"]) if resumed else (0, 0)

for epoch in range(first, options.epochs):
    sampler.set_epoch(epoch)
    for inputs, classes in DataLoader(dataset, batch_size=16, sampler=sampler):
        loss = torch.nn.functional.cross_entropy(trained(inputs), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        sampler.advance(len(inputs))
        snapshots.take(step, epoch=epoch)
        elastic_agent.report_progress(step, epoch=epoch)
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step}, {dist.get_world_size()} workers: loss {loss.item():.4f}", flush=True)
snapshots.close()
dist.destroy_process_group()
