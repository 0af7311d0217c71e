"""Trains a small network in a process that is started anew at every change, with a snapshot in the agent's memory after each
step: by DDP, or with the word `sharded` by FSDP2. It writes checkpoints if the test has made a folder for them, and ends
after the step that the test names."""

import time

import harness

harness.report_start()

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import elastic_agent.torch as elastic
from elastic_agent.torch.slots import Slots

import sys

SAMPLES, BATCH = 240, 24
folder = harness.DIR / "checkpoints"


def hold_when_told(slots, *arguments, complete=Slots.complete):
    """A copy that has all of its numbers and not its mark, when the test wants to kill this process then."""
    if harness.is_set("hold"):
        harness.trace("held")
        time.sleep(1000)
    return complete(slots, *arguments)


Slots.complete = hold_when_told
torch.set_num_threads(1)
dist.init_process_group("gloo")
# Ranks of another round would begin with other parameters.
torch.manual_seed(harness.ROUND)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).double()
sharded = "sharded" in sys.argv[1:]
if sharded:
    trained = fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (harness.WORLD_SIZE,)))
else:
    trained = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
pixels, labels = harness.digits(SAMPLES)


def size():
    """Of all parameters: the same number from every rank."""
    parts = [one.to_local() if sharded else one for one in model.parameters()]
    own = sum((one.detach().abs().sum() for one in parts), torch.zeros((), dtype=torch.float64))
    if sharded:
        dist.all_reduce(own)
    return own.item()


snapshots = elastic.Snapshots(
    {"model": model, "optimizer": optimizer, "scheduler": scheduler},
    checkpoint_dir=folder if folder.is_dir() else None,
    checkpoint_every=10,
)
resumed = snapshots.resume()
step = resumed.step if resumed else 0
if resumed:
    assert resumed.more == {"seen": step * BATCH}, resumed
harness.trace("begin", step=step, source=resumed.source if resumed else "nothing", sum=size())
while True:
    end = torch.tensor([int((harness.DIR / "end").read_text()) if harness.is_set("end") else 1_000_000])
    dist.broadcast(end, 0)
    if step >= int(end):
        break
    first = step * BATCH % SAMPLES
    places = range(first + harness.RANK, first + BATCH, harness.WORLD_SIZE)
    loss = torch.nn.functional.cross_entropy(trained(pixels[places].double()), labels[places])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
    harness.trace("done", step=step, sum=size())
    snapshots.take(step, seen=step * BATCH)
    time.sleep(0.01)
snapshots.close()
harness.trace("end", step=step, sum=size())
dist.destroy_process_group()
harness.exit_now()
