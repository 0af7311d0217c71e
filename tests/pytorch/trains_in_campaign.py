"""The fault campaign's training with PyTorch: a Session that trains on digits and writes a trace like elastic-trainer's.

    trains_in_campaign.py --epochs N --trace FILE [--checkpoint-dir FOLDER]

Instead of a loss, a step's line has a digest of all parameters after it.
"""

import argparse
import hashlib
import json
import os
import sys
import time
import types

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent
import elastic_agent.torch as elastic

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--trace", required=True)
parser.add_argument("--checkpoint-dir")
arguments = parser.parse_args()

# An optimizer imports all of torch.compile, only to say that it is not to be compiled. That costs each worker as much as
# torch itself, and nothing here compiles.
compiler = types.ModuleType("torch._dynamo")
compiler.disable = lambda function, *_, **__: function
compiler.graph_break = lambda: None
torch._dynamo = sys.modules["torch._dynamo"] = compiler

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
elastic_agent.ready()

import harness  # noqa: E402

pixels, labels = harness.digits(1797)
dataset = TensorDataset(pixels, labels)
# As many steps as elastic-trainer does.
sampler = elastic.ElasticBatchSampler(dataset, global_batch=80, micro_batch=20, seed=7)
loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, persistent_workers=True)


def tell(event, **facts):
    """Adds a line. Only rank 0 does."""
    if session.rank == 0:
        line = {"event": event, "round": int(os.environ["ELASTIC_ROUND"]), **facts}
        harness.append(arguments.trace, json.dumps(line))


def state():
    parts = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def begin(session):
    tell("begin", step=session.step_number, world_size=session.world_size)


session = elastic.Session(
    model,
    optimizer,
    sampler,
    on_group=begin,
    checkpoint_dir=arguments.checkpoint_dir,
    checkpoint_every=25,
    snapshot_every=1,
    same_bits=True,
    # What --peer-timeout is for elastic-trainer.
    operation_timeout=6,
)
with session:
    while session.epoch < arguments.epochs:
        for images, numbers in session.steps(loader, epochs=session.epoch + 1):
            epoch, first, end = sampler.epoch, sampler.position, sampler.position + sampler.step_size()
            session.backward(torch.nn.functional.cross_entropy(model(images), numbers))
            # So that faults of seconds are injected into a training, as elastic-trainer's larger network has it.
            time.sleep(0.03)
            if session.step():
                facts = {"step": session.step_number, "epoch": epoch, "first": first, "end": end}
                tell("step", **facts, state=state(), world_size=session.world_size)
harness.exit_now()
