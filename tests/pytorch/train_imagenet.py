"""The shape of PyTorch's elastic ImageNet example: each node keeps checkpoints on a disk of its own; when a group forms,
the worker that is furthest hands its state to all; a sampler that can go on in the middle of an epoch. It trains until
the test says `finish`."""

import harness

harness.report_start()

import os
import time

import elastic_agent
import elastic_agent.torch as elastic
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 240
BATCH = 8
OWN_DISK = harness.DIR / f"disk-{harness.NODE}"


class State:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(64, 10)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.sampler = elastic_agent.ElasticSampler(SAMPLES, seed=5)
        self.step = 0

    def capture(self) -> dict:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "sampler")}
        return {**parts, "step": self.step}

    def apply(self, captured: dict) -> None:
        for name in ("model", "optimizer", "sampler"):
            getattr(self, name).load_state_dict(captured[name])
        self.step = captured["step"]

    def save(self) -> None:
        OWN_DISK.mkdir(exist_ok=True)
        scratch = OWN_DISK / f"{os.getpid()}.tmp"
        torch.save(self.capture(), scratch)
        scratch.rename(OWN_DISK / "checkpoint.pt")

    def load(self) -> None:
        path = OWN_DISK / "checkpoint.pt"
        own = path.exists()
        saved = torch.load(path) if own else None
        _, furthest = elastic.share_furthest(saved["step"] if own else 0, saved)
        if furthest is not None:
            self.apply(furthest)
        harness.trace("begin", step=self.step, own=own, **self.sampler.state_dict())


@record
def main() -> None:
    torch.manual_seed(harness.RANK)
    dist.init_process_group("gloo")
    state = State()
    state.load()
    pixels, shown = harness.digits(SAMPLES)
    dataset = TensorDataset(pixels, shown, torch.arange(SAMPLES))
    model = DistributedDataParallel(state.model)
    epoch = state.sampler.epoch
    finish = False
    while not finish:
        state.sampler.set_epoch(epoch)
        for batch, target, index in DataLoader(dataset, batch_size=BATCH, sampler=state.sampler):
            loss = torch.nn.functional.cross_entropy(model(batch), target)
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            state.step += 1
            state.sampler.advance(len(index))
            harness.trace("step", step=state.step, epoch=epoch, used=index.tolist())
            # All have told of the steps that any checkpoint holds.
            dist.barrier()
            # The nodes' disks hold different steps.
            if harness.RANK == 0 or state.step % 3 == 0:
                state.save()
            elastic_agent.report_progress(state.step, epoch=epoch, loss=loss.item())
            time.sleep(0.02)
            word = torch.tensor([int(harness.is_set("finish"))])
            dist.broadcast(word, 0)
            if finish := bool(word):
                break
        epoch += 1
    dist.destroy_process_group()


main()
harness.exit_now()
