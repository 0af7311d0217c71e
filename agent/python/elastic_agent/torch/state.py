"""What the steps of a session change, as one value: taken from this rank, sent between ranks, and loaded. disk.py says
where it outlives the process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
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
        scheduler_per: str = "step",
    ) -> None:
        """seed: the script's. Without one rank 0's is part of the state. scheduler_per: "step" or "epoch". Raises
        ValueError for another word."""
        if scheduler_per not in ("step", "epoch"):
            raise ValueError(f'scheduler_per is "step" or "epoch", not {scheduler_per!r}')
        self._by_epoch = scheduler_per == "epoch"
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
        # An optimizer that draws must draw the same on all ranks.
        self.seed_for("optimizer")
        self.optimizer.step()
        epoch = self.sampler.epoch
        self.sampler.advance()
        if self.scheduler is not None and (not self._by_epoch or self.sampler.epoch > epoch):
            self.scheduler.step()
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

    def result(self) -> dict[str, Any]:
        """The state without what only further steps need."""
        return {name: one for name, one in self.value().items() if name != "optimizer"}

    def load(self, value: dict[str, Any]) -> None:
        """Continues from a state. Raises ValueError for one of another training, before anything is changed."""
        self.sampler.load_state_dict(value["sampler"])
        self.model.load_state_dict(value["model"])
        if "optimizer" in value:
            self.optimizer.load_state_dict(value["optimizer"])
            self._keep_types(value["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(value["scheduler"])
        if not self._given:
            self.seed = value["seed"]
        self.step_number = value["step"]

    def _keep_types(self, given: dict[str, Any]) -> None:
        """PyTorch gives an optimizer's state the type of its parameters, such as bfloat16: other ranks may have more."""
        numbers = [number for group in given["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters):
            own = self.optimizer.state.get(parameter, {})
            for name, value in given["state"].get(number, {}).items():
                now = own.get(name)
                if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                    own[name] = value.to(now.device)


def _senders(descriptions: list[dict[str, Any]], holders: Sequence[int]) -> list[int]:
    """Which holder sends each tensor: always one with the least to send so far. It is the same on every rank."""
    load = dict.fromkeys(holders, 0)
    chosen = []
    for one in descriptions:
        holder = min(load, key=lambda rank: (load[rank], rank))
        load[holder] += tree.size_of(one)
        chosen.append(holder)
    return chosen


def share(
    group: Group, value: Callable[[], Any], holders: Sequence[int], receivers: Sequence[int], mesh: Any = None
) -> Any:
    """Gives the `receivers` the state that the `holders` have. Each of these sends a part of it. Every rank calls this,
    and holders have an equal `value`. Returns what this rank is to load, None on others. `mesh`: the device mesh of its
    sharded tensors."""
    if group.rank not in receivers:
        if receivers:
            group.finish_with_all(_send(group, value(), holders, receivers) if group.rank in holders else [])
        return None
    length = torch.zeros(1, dtype=torch.int64)
    group.finish(group.start_receive([length], holders[0]))
    text = torch.empty(int(length), dtype=torch.uint8)
    group.finish(group.start_receive([text], holders[0]))
    description = tree.of_bytes(text)
    tensors = tree.room_for(description)
    of_sender: dict[int, list[torch.Tensor]] = {}
    for tensor, sender in zip(tensors, _senders(tree.tensors_of(description), holders)):
        of_sender.setdefault(sender, []).append(tree.as_bytes(tensor))
    group.finish_with_all([group.start_receive(parts, sender) for sender, parts in of_sender.items()])
    return tree.put_together(description, tensors, lambda _: mesh)


def _send(group: Group, state: Any, holders: Sequence[int], receivers: Sequence[int]) -> list[Any]:
    """Begins to send this rank's part of `state` to all `receivers`."""
    description, tensors = tree.take_apart(state)
    senders = _senders(tree.tensors_of(description), holders)
    parts = [tree.as_bytes(one) for one, sender in zip(tensors, senders) if sender == group.rank]
    if group.rank == holders[0]:
        text = tree.to_bytes(description)
        parts = [torch.tensor([len(text)]), text, *parts]
    return [group.start_send(parts, rank) for rank in receivers]
