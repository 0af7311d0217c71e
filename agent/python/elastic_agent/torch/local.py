"""Steps without a sum of gradients, for slow links: each rank trains by itself, and now and then the ranks add up how far
their parameters have come.

    the same parameters ──▶ inner steps, each rank's own ──▶ the mean of all ways ──▶ an outer step ──▶ committed …
             ▲                          │ a peer is gone               │
             └──────────────────────────┴──────────────────────────────┘

It is DiLoCo (A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023); without an
outer optimizer the parameters are the mean of all ranks', as in LocalSGD (S. Stich, "Local SGD Converges Fast and
Communicates Little", ICLR 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import collectives
from .group import Group
from .state import Training
from .votes import Vote, Votes, room


class LocalGradients:
    """The gradients of this rank's own samples, and the votes of all ranks."""

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """named: a model's parameters with their names. Raises ValueError if none is trained."""
        self._parameters = [parameter for _, parameter in named if parameter.requires_grad]
        if not self._parameters:
            raise ValueError("the model has no parameter that requires a gradient")
        self._vote = Vote()
        self._works: list[Any] = []

    def clear(self) -> None:
        """Forgets all gradients."""
        self._works = []
        for parameter in self._parameters:
            parameter.grad = None

    def keep(self, *, first: bool) -> None:
        """The backward pass of one batch is over: the next one adds to its gradient."""

    def sum_over(self, group: Group, vote: Vote) -> None:
        """The next backward pass is this rank's last of the step. Meanwhile the votes are on their way."""
        places = torch.zeros(room(group.size), dtype=torch.float64)
        vote.write(places, group.rank)
        self._vote, self._works = vote, [group, places, group.start_sum(places)]

    def finish(self) -> Votes:
        """Waits for the votes."""
        (group, places, work), self._works = self._works, []
        group.finish(work)
        return Votes.read(places) if group.size > 1 else Votes.of_one(self._vote)

    def divide(self, count: float) -> None:
        """Divides the gradient by this rank's own count."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self._vote.count or 1)

    def remove(self) -> None:
        """Nothing is fastened to the parameters."""


class LocalTraining(Training):
    """What inner steps change on this rank alone, and outer steps on all. Others get, and disks hold, what it was after
    the last outer step, without the state of inner optimizers: that is each rank's own."""

    def __init__(self, *given: Any, steps: int, outer: Callable[[list[torch.nn.Parameter]], Any] | None) -> None:
        """steps: the most inner steps from one outer step to the next. outer: makes the optimizer of outer steps."""
        super().__init__(*given)
        if steps < 1:
            raise ValueError("local_steps is 1 or more")
        self.stride = steps
        self._parameters = [one for one in self.model.parameters() if one.requires_grad]
        self._outer = outer(self._parameters) if outer else None
        if outer:
            self._state.outer = self._outer
        self.compared = [self._outer] if outer else []
        # The step and the epoch of the last commit.
        self._at = -1, 0

    @property
    def is_common(self) -> bool:  # type: ignore[override]  # It changes.
        """Whether all ranks have this state: after an outer step."""
        return self._at[0] in (-1, self.step_number)

    def is_due(self, *, changes: bool) -> bool:
        """After an inner step: whether an outer one follows: after `local_steps`, at the end of an epoch, and before the
        group changes."""
        return changes or self.step_number % self.stride == 0 or self.sampler.epoch != self._at[1]

    def outer_step(self, group: Group) -> None:
        """Has all ranks come to the same parameters. Raises GroupLost, perhaps when some are there."""
        begun = self._state.committed()["model"]
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        with torch.no_grad():
            anchors = [begun[names[one]] for one in self._parameters]
            for one, anchor in zip(self._parameters, anchors):
                # How far it has come, as if that were a gradient.
                one.grad = anchor - one
            collectives.mean_gradients(group, self._parameters)
            for one, anchor in zip(self._parameters, anchors):
                one.copy_(anchor)
                if self._outer is None:
                    one.sub_(one.grad)
            if self._outer is not None:
                self._outer.step()
            for one in self._parameters:
                one.grad = None

    def commit(self) -> None:
        """All ranks have this state. Takes a copy, also of the inner optimizers."""
        self._state.commit()
        self._at = self.step_number, self.sampler.epoch

    def restore(self) -> None:
        """A peer is gone: the inner steps since the last outer one are not done."""
        if not self.is_common:
            self._state.restore()
            self.step_number = self._at[0]

    def value(self) -> dict[str, Any]:
        value = super().value()
        return {**value, "optimizer": _each(value["optimizer"], lambda one, _: {**one, "state": {}})}

    def load(self, value: dict[str, Any]) -> None:
        if "optimizer" in value:
            own = self._state.state_dict()["optimizer"]
            with_own = _each(value["optimizer"], lambda one, number: {**one, "state": _at(own, number)["state"]})
            value = {**value, "optimizer": with_own}
        super().load(value)
        self._at = self.step_number, self.sampler.epoch


def _each(states: Any, change: Callable[[dict[str, Any], int], dict[str, Any]]) -> Any:
    """The changed state of one optimizer, or of each of several."""
    if isinstance(states, (list, tuple)):
        return type(states)(change(one, number) for number, one in enumerate(states))
    return change(states, 0)


def _at(states: Any, number: int) -> dict[str, Any]:
    return states[number] if isinstance(states, (list, tuple)) else states
