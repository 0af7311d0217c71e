"""Distributed data parallel training as tutorials show it: a checkpoint each epoch, written by rank 0 to a folder that
all nodes share, and read by all when they start. It knows nothing of its launcher. It trains until the test says
`finish`; with `--fail` it raises in its second epoch."""

import harness

harness.report_start()

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# Divides by 1, 2, 3 and 4 workers, so that no sample is padded.
SAMPLES = 240
CHECKPOINT = harness.DIR / "checkpoint.pt"


def load_checkpoint(model, optimizer) -> int:
    if not CHECKPOINT.exists():
        return 0
    state = torch.load(CHECKPOINT)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


def save_checkpoint(epoch: int, model, optimizer) -> None:
    state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    scratch = CHECKPOINT.with_suffix(f".{os.getpid()}")
    torch.save(state, scratch)
    scratch.rename(CHECKPOINT)


def everyone_finishes() -> bool:
    word = torch.tensor([int(harness.is_set("finish"))])
    dist.broadcast(word, 0)
    return bool(word)


@record
def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    pixels, shown = harness.digits(SAMPLES)
    dataset = TensorDataset(pixels, shown, torch.arange(SAMPLES))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    epoch = load_checkpoint(model, optimizer)
    harness.trace("begin", epoch=epoch)
    while not everyone_finishes():
        sampler.set_epoch(epoch)
        used, total = [], 0.0
        for batch, target, index in loader:
            loss = torch.nn.functional.cross_entropy(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            used += index.tolist()
            total += loss.item()
            # About as long as a step of a larger model.
            time.sleep(0.01)
        if "--fail" in sys.argv and epoch == 1:
            raise ValueError("the digits are illegible")
        harness.trace("epoch", epoch=epoch, used=used, loss=total / len(loader))
        # All have told of the steps that a checkpoint holds.
        dist.barrier()
        if harness.RANK == 0:
            save_checkpoint(epoch, model, optimizer)
            harness.trace("saved", epoch=epoch)
        epoch += 1
    dist.destroy_process_group()


main()
harness.exit_now()
