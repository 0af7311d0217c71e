"""Trains a small network in a Session, and tells which samples each step used. It ends with the epoch that the test names,
and writes checkpoints if the test has made a folder for them. With the word `stateful` it reads by torchdata's
StatefulDataLoader, where that is installed, in processes that read ahead."""

import os
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent
import elastic_agent.torch as elastic

torch.set_num_threads(1)
# Double precision: whatever the order of sums, only the last bits differ.
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10)).double()
# The first optimizer of a process costs seconds of imports.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# Under --warm-up the others wait only for what follows.
elastic_agent.ready()

import harness  # noqa: E402

harness.report_start()

SAMPLES = 240
# Ranks begin with different parameters, and must get rank 0's.
torch.manual_seed(harness.RANK)
model[0].reset_parameters()
model[2].reset_parameters()
pixels, labels = harness.digits(SAMPLES)
dataset = TensorDataset(pixels.double(), labels, torch.arange(SAMPLES))
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
sampler = elastic.ElasticBatchSampler(dataset, 30, micro_batch=12, seed=7)
if "stateful" in sys.argv[1:]:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader
    except ImportError:
        pass
    ahead = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True}
    loader = DataLoader(dataset, batch_sampler=sampler, **ahead)
else:
    loader = DataLoader(dataset, batch_sampler=sampler)
folder = harness.DIR / "checkpoints"


def tell(event, step, **facts):
    # The environment follows the rounds. The harness has read it once.
    harness.ROUND, harness.RANK, harness.WORLD_SIZE = int(os.environ["ELASTIC_ROUND"]), session.rank, session.world_size
    harness.trace(event, step=step, epoch=session.epoch, pid=os.getpid(), at=time.monotonic(), **facts)


def epochs():
    """How many the test wants: no end until it has said so."""
    return int((harness.DIR / "epochs").read_text()) if harness.is_set("epochs") else 1_000_000


session = elastic.Session(
    model,
    optimizer,
    sampler,
    scheduler=scheduler,
    checkpoint_dir=folder if folder.is_dir() else None,
    checkpoint_every=10,
    snapshot_every=1 if harness.is_set("snapshots") else None,
)
with session:
    tell("begin", session.step_number, loader=type(loader).__name__)
    while session.epoch < epochs():
        for images, numbers, places in session.steps(loader, epochs=session.epoch + 1):
            step = session.step_number
            tell("uses", step, used=places.tolist())
            if harness.is_set(f"break-{harness.NODE}"):
                (harness.DIR / f"break-{harness.NODE}").unlink()
                session._group.cut()
            session.backward(torch.nn.functional.cross_entropy(model(images), numbers))
            if session.step():
                harness.trace("applied", step=step, pid=os.getpid(), at=time.monotonic())
            time.sleep(0.005)
    tell("end", session.step_number, sum=sum(float(one.detach().abs().sum()) for one in model.parameters()))
harness.exit_now()
