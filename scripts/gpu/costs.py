"""What a session costs: GPT-2's step in a session of one rank and in a plain loop. session.py runs it."""

import argparse
import statistics
import time
import warnings
from typing import Callable

import elastic_agent.torch as elastic
import torch
from models import Gpt
from nccl import Failed
from report import result
from torch.utils.data import DataLoader, TensorDataset


class Timed:
    """GPT-2's step, timed in a session of one rank and in a plain loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        small, self.device = options.small, options.device
        self.shape = (64, 32, 2, 2, 32) if small else (50257, 1024, 12, 12, 768)
        self.batch, self.steps = (4, 5) if small else (8, 20)
        self.data = torch.randint(self.shape[0], (self.batch, self.shape[1]), device=self.device)
        # Batches for all steps of one epoch: neither loop starts a loader again.
        self.dataset = TensorDataset(torch.arange((self.steps + 10) * self.batch))
        self.settle = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        # How often the steps of each session waited for the GPU.
        self.waits: "list[int]" = []

    def model_and_optimizer(self):
        torch.manual_seed(1)
        model = Gpt(*self.shape).to(self.device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.device == "cuda" or None)

    def loss_of(self, model):
        with torch.autocast(self.device, dtype=torch.bfloat16):
            return model(self.data, self.data) / self.data.numel()

    def time(self, step: "Callable[[], object]") -> float:
        """The milliseconds of a step, of steps that follow each other freely."""
        for _ in range(3):
            step()
        self.settle()
        began = time.perf_counter()
        for _ in range(self.steps):
            step()
        self.settle()
        return 1e3 * (time.perf_counter() - began) / self.steps

    def plain(self) -> float:
        model, optimizer = self.model_and_optimizer()
        batches = iter(DataLoader(self.dataset, self.batch))

        def step():
            next(batches)
            optimizer.zero_grad(set_to_none=True)
            self.loss_of(model).backward()
            optimizer.step()

        return self.time(step)

    def in_session(self) -> float:
        model, optimizer = self.model_and_optimizer()
        sampler = elastic.ElasticBatchSampler(self.dataset, self.batch)
        with elastic.Session(model, optimizer, sampler) as session:
            batches = session.steps(DataLoader(self.dataset, batch_sampler=sampler))

            def step():
                next(batches)
                session.backward(self.loss_of(model))
                session.step()

            taken = self.time(step)
            if self.device == "cuda":
                self.waits.append(waited(step))
            return taken


def waited(step: "Callable[[], object]") -> int:
    """How often five steps wait for the GPU, which then has nothing to do while the next calls are made."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(5):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught)


def compare(options: argparse.Namespace) -> None:
    """Times GPT-2's step in a session of one rank and in a plain loop, in turns."""
    timed, times = Timed(options), {"plain": [], "in a session": []}
    for _ in range(2 if options.small else 3):
        times["plain"].append(timed.plain())
        times["in a session"].append(timed.in_session())
    medians = {way: statistics.median(each) for way, each in times.items()}
    told = {way: f"{median:.2f} ms" for way, median in medians.items()}
    result(costs="a step", **told, ratio=round(medians["in a session"] / medians["plain"], 3))
    # The loss is read now and then.
    result(waits="for the GPU in 5 steps of a session", found=timed.waits)
    if any(found > 1 for found in timed.waits):
        raise Failed("a session's step waits for the GPU")
