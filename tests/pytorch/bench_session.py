"""Times steps in a Session beside DistributedDataParallel: the same model and batches, in turns, in one process.

    elastic-agent --standalone --nproc-per-node=2 tests/pytorch/bench_session.py [BLOCKS]
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
from models import bench_network

BLOCKS, STEPS, BATCH = int(sys.argv[1]) if len(sys.argv) > 1 else 15, 20, 32
torch.set_num_threads(1)
torch.manual_seed(0)


def block(batches, train):
    began = time.perf_counter()
    for _ in range(STEPS):
        train(*next(batches))
    return (time.perf_counter() - began) / STEPS * 1000


ours, theirs = bench_network(), bench_network()
optimizer = torch.optim.AdamW(ours.parameters())
world = int(os.environ["WORLD_SIZE"])
samples = BATCH * world * STEPS * (BLOCKS + 2)
dataset = TensorDataset(torch.randn(samples, 512), torch.randint(1000, (samples,)))
sampler = elastic.ElasticBatchSampler(dataset, BATCH * world)
times = {"session": [], "ddp": []}
with elastic.Session(ours, optimizer, sampler) as session:
    dist.init_process_group("gloo")
    wrapped = torch.nn.parallel.DistributedDataParallel(theirs, gradient_as_bucket_view=True)
    their_optimizer = torch.optim.AdamW(theirs.parameters())
    loss_of = torch.nn.functional.cross_entropy
    of_session = session.steps(DataLoader(dataset, batch_sampler=sampler))
    part = torch.utils.data.DistributedSampler(dataset, world, session.rank)
    of_ddp = iter(DataLoader(dataset, batch_size=BATCH, sampler=part))

    def by_session(inputs, labels):
        session.backward(loss_of(ours(inputs), labels))
        session.step()

    def by_ddp(inputs, labels):
        their_optimizer.zero_grad()
        loss_of(wrapped(inputs), labels).backward()
        their_optimizer.step()

    for number in range(BLOCKS + 1):
        took = block(of_session, by_session), block(of_ddp, by_ddp)
        if number:
            times["session"].append(took[0])
            times["ddp"].append(took[1])
    if session.rank == 0:
        for name, all_ in times.items():
            print(f"{name}: {statistics.median(all_):.2f} ms a step ({min(all_):.2f}-{max(all_):.2f})")
        print(f"ratio: {statistics.median(times['session']) / statistics.median(times['ddp']):.3f}", flush=True)
os._exit(0)
