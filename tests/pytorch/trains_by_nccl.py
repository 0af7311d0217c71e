"""Trains a small GPT in a Session whose sums go over NCCL, for as many steps as are asked for, and tells of each step:
trains_by_nccl.py --steps N [--device cpu] [--backend gloo] --trace FILE. `scripts/gpu/session.py` runs it under agents, and
kills."""

import argparse
import json
import os
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
from models import Gpt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--trace", required=True)
parser.add_argument("--device", default="cuda")
parser.add_argument("--backend")
arguments = parser.parse_args()

VOCABULARY, CONTEXT, SAMPLES, BATCH = 256, 64, 240, 24

torch.set_num_threads(1)
width = 128 if arguments.device == "cuda" else 32
# Double precision: whatever the order of sums, only the last bits differ. With AdamW that grows to 10^-3 where the loss
# leaps, after some 450 steps.
torch.manual_seed(1)
model = Gpt(VOCABULARY, CONTEXT, layers=4, heads=4, width=width).double().to(arguments.device)
tokens = torch.randint(VOCABULARY, (SAMPLES, CONTEXT + 1))
dataset = TensorDataset(tokens[:, :-1], tokens[:, 1:])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
sampler = elastic.ElasticBatchSampler(dataset, BATCH, micro_batch=8, seed=7)


def trace(event, **facts):
    place = {"round": int(os.environ.get("ELASTIC_ROUND", "0")), "rank": session.rank, "world_size": session.world_size}
    line = json.dumps({"event": event, "time_ms": time.time() * 1e3, "pid": os.getpid(), **place, **facts})
    # One write, so that lines of several processes do not mix.
    file = os.open(arguments.trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, line.encode() + b"\n")
    os.close(file)


session = elastic.Session(model, optimizer, sampler, backend=arguments.backend, operation_timeout=20)
with session:
    trace("begin", step=session.step_number)
    for inputs, targets in session.steps(DataLoader(dataset, batch_sampler=sampler), arguments.steps * BATCH // SAMPLES):
        by_nccl = session._members.group is not None and session._members.group._nccl is not None
        inputs, targets = inputs.to(arguments.device), targets.to(arguments.device)
        session.backward(model(inputs, targets) / targets.numel())
        if session.step() and session.rank == 0:
            trace("step", step=session.step_number, nccl=by_nccl)
    total = sum(float(one.detach().abs().sum()) for one in model.parameters())
    trace("end", step=session.step_number, sum=total)
