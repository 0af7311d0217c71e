"""Trains a small GPT, or with the word `conv` a small convolutional net, in a Session, and dies in that very moment
that the test has ordered: in the midst of a forward pass, of a sum, of a copy, and the like. With `nccl=FILE` sums go
over that stand-in for NCCL.

An order is JSON in the file `order`: `number`, `phase`, `step` (the first to die in), `workers` and `agents` (the nodes
that lose their worker, or their agent), `signal`. It is carried out once on each of these nodes.
"""

import json
import os
import pathlib
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent
import elastic_agent.torch as elastic
from elastic_agent.torch.gradients import Gradients
from elastic_agent.torch.group import Group
from elastic_agent.torch.slots import Slots
from models import Gpt

torch.set_num_threads(1)
CONV = "conv" in sys.argv[1:]
SAMPLES = 240


class PartByPart(torch.optim.AdamW):
    """Between two groups of parameters it may die."""

    def _init_group(self, group, *arguments):
        if group is not self.param_groups[0]:
            die_if_ordered("optimizer")
        return super()._init_group(group, *arguments)


# Double precision: whatever the order of sums, only the last bits differ. No BatchNorm, whose means are each rank's own.
if CONV:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 6, 3), torch.nn.GroupNorm(2, 6), torch.nn.Tanh(), torch.nn.Conv2d(6, 8, 3), torch.nn.Tanh(),
        torch.nn.Flatten(), torch.nn.Linear(128, 10),
    ).double()  # fmt: skip
    middle = model[3]
else:
    model = Gpt(vocabulary=17, context=64, layers=2, heads=2, width=8).double()
    middle = model.transformer["h"][1]
# The first optimizer of a process costs seconds of imports.
parameters = list(model.parameters())
optimizer = PartByPart([{"params": parameters[:3]}, {"params": parameters[3:]}], lr=1e-3)

# Under --warm-up the others wait only for what follows.
elastic_agent.ready()

import harness  # noqa: E402

harness.report_start()
STAND_IN = next((word[len("nccl=") :] for word in sys.argv[1:] if word.startswith("nccl=")), None)
if STAND_IN:
    import stand_in

    stand_in.install(STAND_IN)

pixels, labels = harness.digits(SAMPLES)
if CONV:
    dataset = TensorDataset(pixels.double().view(-1, 1, 8, 8), labels, torch.arange(SAMPLES))
else:
    # A digit's pixels in 17 shades: each is to be predicted from those before it.
    shades = (16 * pixels).long()
    dataset = TensorDataset(shades[:, :-1], shades[:, 1:], torch.arange(SAMPLES))


def mean_loss(inputs, targets):
    if CONV:
        return torch.nn.functional.cross_entropy(model(inputs), targets)
    return model(inputs, targets) / targets.numel()


def agents_pid():
    """Its guard is this worker's parent."""
    status = pathlib.Path(f"/proc/{os.getppid()}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))


def die_if_ordered(phase):
    try:
        order = json.loads((harness.DIR / "order").read_text())
    except FileNotFoundError:
        return
    if order["phase"] != phase or session.step_number < order["step"]:
        return
    if harness.NODE not in order["workers"] + order["agents"]:
        return
    try:
        (harness.DIR / f"struck-{order['number']}-{harness.NODE}").touch(exist_ok=False)
    except FileExistsError:
        return
    tell("struck", number=order["number"])
    how = signal.Signals[f"SIG{order['signal']}"]
    if harness.NODE in order["agents"]:
        os.kill(agents_pid(), how)
        if how == signal.SIGKILL:
            # The kernel ends this worker with it.
            time.sleep(60)
    os.kill(os.getpid(), how)


def start_sum(group, tensor, start=Group.start_sum):
    work = start(group, tensor)
    buckets = session._gradients._buckets
    if tensor is buckets[0].flat:
        die_if_ordered("first sum")
    elif tensor is buckets[-1].flat:
        die_if_ordered("last sum")
    return work


def start_send(group, tensors, *ranks, start=Group.start_send):
    work = start(group, tensors, *ranks)
    die_if_ordered("send")
    return work


def start_receives(group, tensors, start=Group.start_receives):
    work = start(group, tensors)
    if any(len(some) > 1 for some in tensors.values()):
        die_if_ordered("receive")
    return work


def copy(slots, at, tensor, copy=Slots._copy):
    checksum = copy(slots, at, tensor)
    die_if_ordered("snapshot")
    return checksum


Group.start_sum, Group.start_send, Group.start_receives, Slots._copy = start_sum, start_send, start_receives, copy
middle.register_forward_hook(lambda *_: die_if_ordered("forward"))
middle.register_full_backward_hook(lambda *_: die_if_ordered("backward"))


def tell(event, **facts):
    # The environment may have the next round's already, while this rank does the rest of a step that is lost.
    place = {"round": session._members.place["round"], "rank": session.rank, "size": session.world_size}
    harness.trace(event, pid=os.getpid(), at=time.monotonic(), step=session.step_number, **{**facts, **place})


def size():
    return sum(float(one.detach().abs().sum()) for one in model.parameters())


# Ranks begin with different parameters, and must get rank 0's: the undisturbed training has the same.
torch.manual_seed(harness.RANK)
for module in model.modules():
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
sampler = elastic.ElasticBatchSampler(dataset, 30, micro_batch=8, seed=7)
loader = DataLoader(dataset, batch_sampler=sampler)
session = elastic.Session(
    model, optimizer, sampler, scheduler=scheduler, snapshot_every=1, operation_timeout=10
)
# Several sums in a step, as in a large model.
session._gradients.remove()
session._gradients = Gradients(model.named_parameters(), bucket_bytes=4096)
with session:
    while session.epoch < harness.wanted("epochs"):
        for inputs, targets, places in session.steps(loader, epochs=session.epoch + 1):
            tell("uses", epoch=session.epoch, used=places.tolist())
            if STAND_IN and session.world_size > 1:
                assert session._members.group._nccl is not None
            session.backward(mean_loss(inputs, targets))
            if session.step():
                # `step` is the number of steps that it has finished.
                tell("applied", sum=size())
            if not harness.is_set("epochs"):
                # Else what waits for newcomers takes the processors that they begin on.
                time.sleep(0.2)
    tell("end", sum=size())
harness.exit_now()
