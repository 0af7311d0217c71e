"""What the steps of a session change, as one value: taken from this rank, sent between ranks, and loaded. disk.py says
where it outlives the process."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from ..batches import ElasticBatchSampler
from . import tree
from .frozen import Frozen
from .group import Group
from .snapshots import fingerprint

# What a completed session leaves out of its result.
_FOR_STEPS = {"optimizer", "scaler", "outer"}


class State:
    """What training changes, by names: models, optimizers, schedulers, a GradScaler, anything else that has `state_dict`
    and `load_state_dict`, lists and dicts of these, and plain values.

    ::

        state = elastic.State(model=model, ema=ema, optimizers=[muon, adamw], best=0.0)
        state.best = max(state.best, accuracy)

    Each is an attribute, and one that is given later belongs to the state, too. Plain values are tensors, numbers, text,
    and lists, tuples, sets and dicts of these. `elastic.Loop` trains a state; `elastic.Session` carries one along.
    """

    def __init__(self, **parts: Any) -> None:
        """Raises ValueError for a name that a state has for itself."""
        for name in parts:
            if name.startswith("_") or hasattr(State, name):
                raise ValueError(f"a part of a state cannot have the name {name!r}: give it another")
        vars(self).update(parts)
        self._committed: tuple[Any, list[torch.Tensor]] | None = None
        # Weights that are not trained are copied again only when they change.
        self._frozen, self._changes = Frozen(()), dict[int, int]()

    def state_dict(self) -> dict[str, Any]:
        """The values of all parts. Tensors are those of the parts."""
        return {name: _value_of(part) for name, part in self._parts().items()}

    def load_state_dict(self, value: dict[str, Any]) -> None:
        """Gives the parts these values. Raises ValueError if the value of one is missing, before any is changed."""
        parts = self._parts()
        for name in parts:
            if name not in value:
                raise ValueError(
                    f"the state to continue from has no {name!r}: take it out of this training, or begin another job"
                )
        for name in [*parts, *(name for name in value if name not in parts)]:
            setattr(self, name, _loaded(parts.get(name), value[name], name))

    def committed(self) -> dict[str, Any]:
        """The values of the last `commit`. Tensors are those that are kept: they may be read only. Raises RuntimeError if
        there was none."""
        if self._committed is None:
            raise RuntimeError("there was no state.commit yet")
        return tree.put_together(*self._committed)

    def commit(self) -> None:
        """Keeps a copy of all values, for `restore`. A loop commits at the end of each step."""
        description, tensors = tree.take_apart(self.state_dict())
        kept = self._committed[1] if self._committed else []
        forms = [[(one.shape, one.dtype, one.device) for one in some] for some in (kept, tensors)]
        if forms[0] != forms[1]:
            kept = [torch.empty_like(one) for one in tensors]
            models = (one for one in leaves(self) if isinstance(one, torch.nn.Module))
            self._frozen, self._changes = Frozen(one for model in models for one in model.parameters()), {}
        before, self._changes = self._changes, self._frozen.changes()
        for place, one in zip(kept, tensors):
            at = one.data_ptr()
            if at not in self._changes or before.get(at) != self._changes[at]:
                place.copy_(one)
        self._committed = description, kept

    def restore(self) -> None:
        """Gives all parts the values of the last `commit`. A loop does so after a step that a peer has not finished.
        Raises RuntimeError if there was none."""
        # Optimizers keep the tensors that they are given.
        value = copy.deepcopy(self.committed())
        for name in self._parts().keys() - value.keys():
            delattr(self, name)
        self.load_state_dict(value)

    def _parts(self) -> dict[str, Any]:
        return {name: part for name, part in vars(self).items() if not name.startswith("_")}


def leaves(part: Any) -> Iterator[Any]:
    """The parts of a state that no other part holds."""
    if isinstance(part, State):
        part = part._parts()
    if type(part) in (list, tuple, dict):
        for one in part.values() if isinstance(part, dict) else part:
            yield from leaves(one)
    else:
        yield part


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _value_of(part: Any) -> Any:
    if _has_state(part):
        return part.state_dict()
    if type(part) in (list, tuple):
        return type(part)(map(_value_of, part))
    if type(part) is dict:
        return {key: _value_of(one) for key, one in part.items()}
    return part


def _loaded(part: Any, value: Any, where: str) -> Any:
    """The part with this value: the same object, if it is more than a value."""
    if _has_state(part):
        if value is None:
            raise ValueError(f"the state to continue from has nothing for {where!r}: it was made by another script")
        part.load_state_dict(value)
        if isinstance(part, torch.optim.Optimizer):
            _keep_types(part, value)
        return part
    if type(part) in (list, tuple, dict) and any(map(_has_state, leaves(part))):
        if type(value) is not type(part) or len(value) != len(part):
            raise ValueError(f"the state to continue from has another number of {where!r}: it was made by another script")
        if isinstance(part, dict):
            return {key: _loaded(one, value[key], f"{where}[{key!r}]") for key, one in part.items()}
        return type(part)(_loaded(one, value[at], f"{where}[{at}]") for at, one in enumerate(part))
    if isinstance(part, torch.Tensor) and isinstance(value, torch.Tensor):
        if (part.shape, part.dtype) != (value.shape, value.dtype):
            return value.to(part.device)
        part.detach().copy_(value)
        return part
    return value


def _keep_types(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    """PyTorch gives an optimizer's state the type of its parameters, such as bfloat16: other ranks may have more."""
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters):
        own = optimizer.state.get(parameter, {})
        for name, value in given["state"].get(number, {}).items():
            now = own.get(name)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                own[name] = value.to(now.device)


class Progress:
    """A state of the script's own, and the number of steps that are done."""

    # Whether all ranks have this state; and the most steps until they have one again.
    is_common, stride = True, 1

    def __init__(self, state: State) -> None:
        self.step_number = 0
        self._state = State(state=state)
        # Those that alone change what a snapshot copies late. A script's own loop may change all by itself.
        self.optimizers: list[Any] = []

    def facts(self) -> dict[str, Any]:
        """What tells its snapshots from those of another training."""
        return {"loop": [fingerprint(one) for one in leaves(self._state) if _has_state(one)]}

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Those of all models."""
        for one in leaves(self._state):
            if isinstance(one, torch.nn.Module):
                yield from one.parameters()

    def set_place(self, rank: int, world_size: int, absent: Collection[int] = ()) -> None:
        """This worker has another place from now on. absent: the ranks that compute nothing in the next step."""

    def value(self) -> dict[str, Any]:
        """The state. Its tensors are those of the parts."""
        return {"step": self.step_number, **self._state.state_dict()}

    def result(self) -> dict[str, Any]:
        """What workers that come too late get."""
        return self.value()

    def load(self, value: dict[str, Any]) -> None:
        """Continues from a state. Raises ValueError for one of another training, before anything is changed."""
        self._state.load_state_dict({name: one for name, one in value.items() if name != "step"})
        self.step_number = value["step"]


class Training(Progress):
    """A model, what trains it, and the number of steps that are done."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        sampler: ElasticBatchSampler,
        scheduler: Any = None,
        seed: int | None = None,
        scheduler_per: str = "step",
        scaler: Any = None,
        more: State | None = None,
    ) -> None:
        """optimizer, scheduler: one, or several. seed: the script's. Without one rank 0's is part of the state.
        scheduler_per: "step" or "epoch". Raises ValueError for another word. more: what belongs to the state, besides."""
        if scheduler_per not in ("step", "epoch"):
            raise ValueError(f'scheduler_per is "step" or "epoch", not {scheduler_per!r}')
        self._by_epoch = scheduler_per == "epoch"
        self.model, self.sampler, self.scaler = model, sampler, scaler
        self.optimizers, schedulers = listed(optimizer), [] if scheduler is None else listed(scheduler)
        # Those whose state is the same on all ranks.
        self.compared = self.optimizers
        self._plateaus = [one for one in schedulers if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau)]
        self._schedulers = [one for one in schedulers if one not in self._plateaus]
        self.step_number = 0
        # What `follow` was given, until a step is applied.
        self.metric: float | None = None
        # Whether the scaler knows of a gradient that no step has applied yet.
        self._unscaled = False
        self._given, self.seed = seed is not None, torch.initial_seed() if seed is None else seed
        # First what may refuse a value.
        self._state = State(sampler=sampler, model=model, optimizer=optimizer, scheduler=scheduler)
        if scaler is not None:
            self._state.scaler = scaler
        if more is not None:
            self._state.state = more
        # torch.manual_seed takes a tenth of a millisecond for devices that are not in use: it keeps the stack for each.
        on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        self._set_seed = torch.default_generator.manual_seed if on_cpu else torch.manual_seed

    def facts(self) -> dict[str, Any]:
        return {"session": [fingerprint(self.model), self.sampler.facts()]}

    def set_place(self, rank: int, world_size: int, absent: Collection[int] = ()) -> None:
        self.sampler.set_place(rank, world_size, absent)

    def seed_for(self, what: int | str) -> None:
        """Sets torch's random numbers: those of a batch depend on the seed, the step and the batch's place."""
        self._set_seed(random.Random(f"{self.seed} {self.step_number} {what}").getrandbits(63))

    def follow(self, metric: float) -> None:
        """Has the next step begin with this metric's learning rate. Raises ValueError if no scheduler follows one."""
        if not self._plateaus:
            raise ValueError("session.step_scheduler is for a session whose scheduler is a ReduceLROnPlateau")
        self.metric = metric

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What the backward pass begins with."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self) -> None:
        """Gives the parameters the gradient itself. It is the group's, and the same on all ranks: so all find alike
        whether it has infinite numbers."""
        if self.scaler is not None:
            self._unscaled = True
            for one in self.optimizers:
                self.scaler.unscale_(one)

    def forget_gradient(self) -> None:
        """A gradient that was unscaled is not applied."""
        if self._unscaled:
            self.scaler.update(self.scaler.get_scale())
        self._unscaled = False

    def apply(self, metric: float | None = None) -> None:
        """Does the step whose gradient is in the parameters. metric: what the ranks were given to follow."""
        # An optimizer that draws must draw the same on all ranks.
        self.seed_for("optimizer")
        for one in self._plateaus if metric is not None else []:
            one.step(metric)
        self.metric = None
        for one in self.optimizers:
            one.step() if self.scaler is None else self.scaler.step(one)
        if self.scaler is not None:
            self.scaler.update()
            self._unscaled = False
        epoch = self.sampler.epoch
        self.sampler.advance()
        if not self._by_epoch or self.sampler.epoch > epoch:
            for one in self._schedulers:
                one.step()
        self.step_number += 1

    def value(self) -> dict[str, Any]:
        metric = {} if self.metric is None else {"metric": self.metric}
        return {**super().value(), "seed": self.seed, **metric}

    def result(self) -> dict[str, Any]:
        """The state without what only further steps need."""
        return {name: one for name, one in self.value().items() if name not in _FOR_STEPS}

    def load(self, value: dict[str, Any]) -> None:
        if not _FOR_STEPS & value.keys():
            value = {**{name: one for name, one in self.value().items() if name in _FOR_STEPS}, **value}
        seed, self.metric = value["seed"], value.get("metric")
        super().load({name: one for name, one in value.items() if name not in ("seed", "metric")})
        if not self._given:
            self.seed = seed


def listed(one: Any) -> list[Any]:
    """Several, or one, as a list."""
    return [*one] if isinstance(one, (list, tuple)) else [one]


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
    group: Group,
    value: Callable[[], Any],
    holders: Sequence[int],
    receivers: Sequence[int],
    mesh: Any = None,
) -> Any:
    """Gives the `receivers` the state that the `holders` have. Each of these sends a part of it. Every rank calls this,
    and holders have an equal `value`. Returns what this rank is to load, None on others. `mesh` gives the device mesh
    of what is described as sharded."""
    if group.rank not in receivers and (not receivers or group.rank not in holders):
        if receivers:
            group.finish_with_all([])
        return None
    receives = group.rank in receivers
    description, tensors = _meet_description(group, value, holders, receivers)
    described = tree.tensors_of(description)
    if receives:
        tensors = tree.room_for(description)
    parts: dict[int, list[torch.Tensor]] = {}
    for one, sender in zip(tensors, _senders(described, holders)):
        parts.setdefault(sender, []).append(one)
    if receives:
        work = group.start_receives({sender: [tree.as_bytes(one) for one in some] for sender, some in parts.items()})
    else:
        work = group.start_send(list(map(tree.as_bytes, parts.get(group.rank, ()))), *receivers)
    group.finish_with_all([work])
    return tree.put_together(description, tensors, mesh) if receives else None


def _meet_description(
    group: Group, value: Callable[[], Any], holders: Sequence[int], receivers: Sequence[int]
) -> tuple[Any, list[Any]]:
    """The first holder's description of the state, and the tensors of a holder."""
    if group.rank in receivers:
        length = torch.zeros(1, dtype=torch.int64)
        group.finish(group.start_receive([length], holders[0]))
        text = torch.empty(int(length), dtype=torch.uint8)
        group.finish(group.start_receive([text], holders[0]))
        return tree.of_bytes(text), []
    description, tensors = tree.take_apart(value())
    if group.rank == holders[0]:
        text = tree.to_bytes(description)
        group.finish(group.start_send([torch.tensor([len(text)]), text], *receivers))
    return description, tensors
