"""What the steps of a session change, as one value: taken from this rank, sent between ranks, and loaded. disk.py says
where it outlives the process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from ..batches import ElasticBatchSampler
from . import tree
from .group import Group


class Training:
    """A model, what trains it, and the number of steps that are done."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: ElasticBatchSampler,
        scheduler: Any = None,
        seed: int | None = None,
    ) -> None:
        """seed: the script's. Without one rank 0's is part of the state."""
        self.model, self.optimizer, self.sampler, self.scheduler = model, optimizer, sampler, scheduler
        self.step_number = 0
        self._given, self.seed = seed is not None, torch.initial_seed() if seed is None else seed
        # torch.manual_seed takes a tenth of a millisecond for devices that are not in use: it keeps the stack for each.
        on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        self._set_seed = torch.default_generator.manual_seed if on_cpu else torch.manual_seed

    def seed_for(self, what: int | str) -> None:
        """Sets torch's random numbers: those of a batch depend on the seed, the step and the batch's place."""
        self._set_seed(random.Random(f"{self.seed} {self.step_number} {what}").getrandbits(63))

    def apply(self) -> None:
        """Does the step whose gradient is in the parameters."""
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.sampler.advance()
        self.step_number += 1

    def value(self) -> dict[str, Any]:
        """The state. Its tensors are those of the model and the optimizer."""
        return {
            "step": self.step_number,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "sampler": self.sampler.state_dict(),
            "seed": self.seed,
        }

    def load(self, value: dict[str, Any]) -> None:
        """Continues from a state. Raises ValueError for one of another training, before anything is changed."""
        self.sampler.load_state_dict(value["sampler"])
        self.model.load_state_dict(value["model"])
        self.optimizer.load_state_dict(value["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(value["scheduler"])
        if not self._given:
            self.seed = value["seed"]
        self.step_number = value["step"]


def _senders(descriptions: list[dict[str, Any]], holders: Sequence[int]) -> list[int]:
    """Which holder sends each tensor: always one with the least to send so far. It is the same on every rank."""
    load = dict.fromkeys(holders, 0)
    chosen = []
    for one in descriptions:
        holder = min(load, key=lambda rank: (load[rank], rank))
        load[holder] += tree.size_of(one)
        chosen.append(holder)
    return chosen


def send(group: Group, state: Any, holders: Sequence[int], receivers: list[int]) -> None:
    """Sends this rank's part of `state` to all `receivers`. Every holder calls this, with an equal state."""
    description, tensors = tree.take_apart(state)
    works, kept = [], []
    if group.rank == holders[0]:
        text = tree.to_bytes(description)
        length = torch.tensor([len(text)])
        kept += [text, length]
        for rank in receivers:
            works += [group.start_send(length, rank, 0), group.start_send(text, rank, 1)]
    for number, sender in enumerate(_senders(tree.tensors_of(description), holders)):
        if sender == group.rank and tensors[number].numel():
            flat = tree.as_bytes(tensors[number])
            kept.append(flat)
            works += [group.start_send(flat, rank, number + 2) for rank in receivers]
    for work in works:
        group.finish(work)


def receive(group: Group, holders: Sequence[int], mesh: Any = None) -> Any:
    """The state that the holders send, each a part of it. `mesh`: the device mesh of its sharded tensors."""
    length = torch.zeros(1, dtype=torch.int64)
    group.finish(group.start_receive(length, holders[0], 0))
    text = torch.empty(int(length), dtype=torch.uint8)
    group.finish(group.start_receive(text, holders[0], 1))
    description = tree.of_bytes(text)
    described, tensors = tree.tensors_of(description), tree.room_for(description)
    works = []
    for number, sender in enumerate(_senders(described, holders)):
        if tensors[number].numel():
            works.append(group.start_receive(tree.as_bytes(tensors[number]), sender, number + 2))
    for work in works:
        group.finish(work)
    return tree.put_together(description, tensors, lambda _: mesh)
