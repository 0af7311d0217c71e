"""Trains a small network in a Session, and tells which samples each step used. It ends with the epoch that the test
names, and writes checkpoints if the test has made a folder for them. With the word `stateful` it reads by torchdata's
StatefulDataLoader, where that is installed, in processes that read ahead; with `shards`, from shards that it can only
read from their beginnings, by two optimizers and with an average of the model. With `rank-batch` steps have a size for
each rank. With `sharded` each node's workers hold one replica together, with `across` those of two nodes, with `tensor`
two of them a part of each layer, and with `pipeline` each of two a stage."""

import os
import sys
import time

import torch
import torch.optim.swa_utils
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent
import elastic_agent.torch as elastic

torch.set_num_threads(1)
# Double precision: whatever the order of sums, only the last bits differ.
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10)).double()
# The first optimizer of a process costs seconds of imports.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# Under --warm-up the others wait only for what follows.
if "sharded" in sys.argv[1:]:
    from torch.distributed.fsdp import fully_shard

    nodes = 2 if "across" in sys.argv[1:] else 1
    mesh = elastic.replica_mesh(nodes, tensor=2 if "tensor" in sys.argv[1:] else 1)
elif "pipeline" in sys.argv[1:]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    nodes = 2 if "across" in sys.argv[1:] else 1
    mesh = elastic.replica_mesh(nodes, pipeline=2)
else:
    nodes = 1
    elastic_agent.ready()

import harness  # noqa: E402

harness.report_start()

SAMPLES = 240
# Replicas begin with different parameters, and must get those of the first.
torch.manual_seed(int(os.environ["GROUP_RANK"]) // nodes)
model[0].reset_parameters()
model[2].reset_parameters()
pixels, labels = harness.digits(SAMPLES)
if "sharded" in sys.argv[1:]:
    if "tensor" in sys.argv[1:]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
stage = None
if "pipeline" in sys.argv[1:]:
    # Both stages have parameters of the same names.
    model = torch.nn.Sequential(*(model[2:] if mesh.get_local_rank() else model[:2]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stage = PipelineStage(model, mesh.get_local_rank(), 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=3, loss_fn=torch.nn.functional.cross_entropy)
dataset = TensorDataset(pixels.double(), labels, torch.arange(SAMPLES))
if "shards" in sys.argv[1:]:
    first = [0, 70, 80, 135]
    shards = [range(at, end) for at, end in zip(first, [*first[1:], SAMPLES])]
    samples = dataset
    dataset = elastic.Shards(shards, [len(shard) for shard in shards], lambda shard: (samples[at] for at in shard))
optimizers, averages = [optimizer], []
if "shards" in sys.argv[1:]:
    optimizers = [torch.optim.AdamW(model[0].parameters(), lr=1e-3), torch.optim.SGD(model[2].parameters(), 0.1, 0.9)]
    averages = [torch.optim.swa_utils.AveragedModel(model)]
schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.999) for one in optimizers]
of_step = {"rank_batch": 15} if "rank-batch" in sys.argv[1:] else {"global_batch": 30}
sampler = elastic.ElasticBatchSampler(dataset, **of_step, micro_batch=15 if stage else 12, seed=7)
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
    # The harness has read its place once.
    place = session._members.place
    harness.ROUND, harness.RANK, harness.WORLD_SIZE = place["round"], session.rank, session.world_size
    harness.trace(event, step=step, epoch=session.epoch, pid=os.getpid(), at=time.monotonic(), **facts)


def whole(parameter):
    return parameter.detach().full_tensor() if "sharded" in sys.argv[1:] else parameter.detach()


def follow_the_group(session):
    """The learning rate by the size of a step."""
    if "rank-batch" in sys.argv[1:]:
        optimizer.param_groups[0]["lr"] = 5e-4 * session.world_size
        tell("group", session.step_number, size=session.world_size)


def wait(numbers):
    """An evaluation that takes as long as the test wants."""
    tell("aside", session.step_number)
    while harness.is_set(f"aside-{harness.NODE}"):
        time.sleep(0.01)
    return numbers.sum()


while harness.is_set(f"late-{harness.NODE}"):
    time.sleep(0.01)
session = elastic.Session(
    model,
    optimizers,
    sampler,
    scheduler=schedulers,
    state=elastic.State(averages=averages),
    on_group=follow_the_group,
    checkpoint_dir=folder if folder.is_dir() else None,
    checkpoint_every=10,
    snapshot_every=1 if harness.is_set("snapshots") else None,
    operation_timeout=2 if harness.is_set("hasty") else 60,
)
with session:
    tell("begin", session.step_number, loader=type(loader).__name__)
    while session.epoch < harness.wanted("epochs"):
        for images, numbers, places in session.steps(loader, epochs=session.epoch + 1):
            step = session.step_number
            reads = not {"tensor", "pipeline"} & {*sys.argv[1:]} or session.rank % 2 == 0
            tell("uses", step, used=places.tolist() if reads else [])
            if harness.is_set(f"break-{harness.NODE}"):
                (harness.DIR / f"break-{harness.NODE}").unlink()
                session._members.group.cut()
            while harness.is_set(f"slow-{harness.NODE}"):
                # As where a first pass compiles.
                time.sleep(0.01)
            if stage:
                with session.backward_pass():
                    schedule.step(*[images] * stage.is_first, target=numbers)
            else:
                session.backward(torch.nn.functional.cross_entropy(model(images), numbers))
            if session.step():
                for average in averages:
                    average.update_parameters(model)
                harness.trace("applied", step=step, pid=os.getpid(), at=time.monotonic())
                if harness.is_set(f"aside-{harness.NODE}"):
                    assert session.evaluate(DataLoader(range(10), batch_size=4), wait) == 45
            if not harness.is_set("epochs"):
                time.sleep(0.05)
    numbers = [one for trained in (model, *averages) for one in trained.parameters()]
    total = torch.tensor(sum(float(whole(one).abs().sum()) for one in numbers), dtype=torch.float64)
    if stage:
        torch.distributed.all_reduce(total)
    tell("end", session.step_number, sum=float(total))
while harness.is_set("tests"):
    time.sleep(0.01)
harness.exit_now()
