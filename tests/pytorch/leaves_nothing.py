"""Trains in a Session whose loader has processes of its own, and breaks its group in every third step. After the
first step of each round it tells what this process has: descriptors, threads, children. It ends when the test says so."""

import os

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent
import elastic_agent.torch as elastic

torch.set_num_threads(1)
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
elastic_agent.ready()

import harness  # noqa: E402

harness.report_start()

pixels, labels = harness.digits(240)
dataset = TensorDataset(pixels, labels)
sampler = elastic.ElasticBatchSampler(dataset, 20, seed=7)
loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
breaks = elastic.Session(model, optimizer, sampler, snapshot_every=1, loss_timeout=0.05, operation_timeout=5)


def children():
    tasks = os.listdir("/proc/self/task")
    return sum(len(open(f"/proc/self/task/{task}/children").read().split()) for task in tasks)


def tell():
    counts = {"descriptors": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}
    harness.trace("has", **counts, children=children(), now=int(os.environ["ELASTIC_ROUND"]))


with breaks as session:
    told, steps = 0, 0
    while not harness.is_set("enough"):
        for inputs, classes in session.steps(loader, epochs=session.epoch + 1):
            round_ = int(os.environ["ELASTIC_ROUND"])
            if told != round_:
                steps = 0
            if steps == 3 and session.rank == 0 and not harness.is_set("enough"):
                session._members.group.cut()
            session.backward(torch.nn.functional.cross_entropy(model(inputs), classes))
            if session.step():
                steps += 1
                if told != round_:
                    told = round_
                    tell()
harness.exit_now()
