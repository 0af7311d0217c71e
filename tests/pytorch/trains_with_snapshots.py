"""Trains a small network in a process that is started again at every change, with a snapshot in the agent's memory
after each step: by DDP, with the word `sharded` by FSDP2, or with `hsdp` by FSDP2 whose replicas are nodes, with
`tensor` by FSDP2 across nodes whose workers have a part of each layer; the test's file `layout` may name another from
then on. It writes checkpoints if the test has made a folder for them, and ends after the step that the test names."""

import hashlib
import os
import sys
import time

import harness

harness.report_start()

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import elastic_agent.torch as elastic
from elastic_agent.torch.slots import Slots

SAMPLES, BATCH = 240, 24
folder = harness.DIR / "checkpoints"


def hold_when_told(slots, *arguments, complete=Slots.complete):
    """An own copy that has all of its numbers and not its mark, when the test wants to kill this process then."""
    if slots._begin == 0 and (harness.is_set("hold") or harness.is_set(f"hold-{harness.NODE}")):
        harness.trace("held", step=step)
        time.sleep(1000)
    return complete(slots, *arguments)


Slots.complete = hold_when_told
torch.set_num_threads(1)
dist.init_process_group("gloo")
# Ranks of another round would begin with other parameters.
torch.manual_seed(harness.ROUND)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).double()
nodes, workers = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
meshes = {"sharded": (nodes * workers,), "hsdp": (nodes, workers), "tensor": (nodes, workers)}
layout = harness.DIR / "layout"
way = layout.read_text() if layout.exists() else " ".join(sys.argv[1:])
sharded, same = meshes.get(way), 1
if way == "tensor":
    mesh, same = init_device_mesh("cpu", sharded, mesh_dim_names=("shards", "parts")), workers
    parallelize_module(model, mesh["parts"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    trained = fully_shard(model, mesh=mesh["shards"])
elif sharded:
    names = ("replicas", "shards")[-len(sharded) :]
    trained = fully_shard(model, mesh=init_device_mesh("cpu", sharded, mesh_dim_names=names))
else:
    trained = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
pixels, labels = harness.digits(SAMPLES)


def size():
    """Of all parameters: the same number from every rank."""
    whole = [one.full_tensor() if sharded else one for one in model.parameters()]
    return sum(one.detach().abs().sum().item() for one in whole)


def digest():
    """Of all numbers of the state, however they are divided: the same from every rank."""
    digest = hashlib.sha256()
    moments = [one for of_parameter in optimizer.state.values() for one in of_parameter.values()]
    for one in [*model.parameters(), *moments]:
        digest.update((one.full_tensor() if hasattr(one, "full_tensor") else one).detach().numpy().tobytes())
    return digest.hexdigest()


snapshots = elastic.Snapshots(
    {"model": model, "optimizer": optimizer, "scheduler": scheduler},
    checkpoint_dir=folder if folder.is_dir() else None,
    checkpoint_every=10,
)
resumed = snapshots.resume()
step = resumed.step if resumed else 0
if resumed:
    assert resumed.more == {"seen": step * BATCH}, resumed
harness.trace("begin", step=step, source=resumed.source if resumed else "nothing", sum=size(), digest=digest())
while True:
    told = torch.tensor([harness.wanted("end"), harness.is_set("hold-b")])
    dist.broadcast(told, 0)
    end, waits_for_nobody = told.tolist()
    if step >= end:
        break
    first = step * BATCH % SAMPLES
    places = range(first + harness.RANK // same, first + BATCH, harness.WORLD_SIZE // same)
    loss = torch.nn.functional.cross_entropy(trained(pixels[places].double()), labels[places])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
    if waits_for_nobody:
        harness.trace("ahead", step=step)
    else:
        harness.trace("done", step=step, sum=size(), digest=digest())
    snapshots.take(step, seen=step * BATCH)
    time.sleep(0.01)
snapshots.close()
harness.trace("end", step=step, sum=size())
dist.destroy_process_group()
harness.exit_now()
