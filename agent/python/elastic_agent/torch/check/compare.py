"""What the notes of runs say of each other. Nothing here imports PyTorch, or looks at the world."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Note = dict[str, Any]
# The session of a script, and the number of steps that are done in it.
At = tuple[int, int]
# By a parameter's name, the sums of its numbers (`probe.sums_of`).
Sums = dict[str, list[float]]


@dataclass
class Run:
    """What is known of one run."""

    title: str
    ranks: int
    # In the order of time.
    notes: list[Note] = field(default_factory=list)
    # Of the agents, by their nodes; those that a signal ended are negative.
    codes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    # Where the workers were when the time was over, by their nodes.
    stuck: dict[str, str] = field(default_factory=dict)
    # Where a fatal signal met them; and what the agents said at last.
    crashed: dict[str, str] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)

    def of(self, *events: str) -> list[Note]:
        """The notes of these kinds."""
        return [one for one in self.notes if one["event"] in events]

    def states(self) -> dict[At, Sums]:
        """The parameters after each step, and those that it began with."""
        notes = [*(one for one in self.of("begins") if one["step"] == 0), *self.of("step")]
        return {(one["which"], one["step"]): one["sums"] for one in reversed(notes)}

    def last(self) -> int:
        """The number of steps of the first session, or loop."""
        return max((one["step"] for one in self.of("step") if one["which"] == 0), default=0)

    def fact(self, name: str, otherwise: Any = None) -> Any:
        """What the script's session is like."""
        entered = self.of("enters")
        return entered[0].get(name, otherwise) if entered else otherwise


class Apart(NamedTuple):
    """Where two trainings are apart."""

    step: int
    parameter: str
    # How far, as a part of how far the training has come.
    far: float


def far_apart(one: Sums, other: Sums, begin: Sums) -> tuple[float, str]:
    """How far two states are apart, as a part of the way from where they began; and the parameter that is the most."""
    apart = {name: _square(one[name], other[name]) for name in one if name in other}
    way = sum(_square(one[name], begin[name]) for name in one if name in begin)
    total = sum(apart.values())
    if not total:
        return 0.0, ""
    worst = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
    return math.sqrt(total / way) if way and math.isfinite(total) else math.inf, worst


def _square(one: list[float], other: list[float]) -> float:
    return sum((a - b) ** 2 for a, b in zip(one, other))


def steps_apart(run: Run, reference: Run) -> Iterator[Apart]:
    """How far the two are apart after each step that both have done."""
    ours, theirs = run.states(), reference.states()
    for at in sorted(ours.keys() & theirs.keys()):
        yield Apart(at[1], *reversed(far_apart(ours[at], theirs[at], theirs.get((at[0], 0), {}))))


def ranks_apart(run: Run) -> tuple[int, str, str, str] | None:
    """The first step after which two ranks had different parameters: the step, the nodes of both, and a parameter."""
    first: dict[tuple[Any, ...], Note] = {}
    for one in sorted(run.of("begins", "step"), key=lambda note: (note["which"], note["step"])):
        # A script may change its State between a step and what follows it.
        other = first.setdefault((one["event"], one["which"], one["step"]), one)
        far, parameter = far_apart(one["sums"], other["sums"], {})
        if far:
            return one["step"], other["node"], one["node"], parameter
    return None


def not_finite(run: Run) -> Note | None:
    """The first step whose loss is not a number."""
    return next((one for one in run.of("step") if not math.isfinite(one.get("loss", 0.0))), None)


def wrong_samples(run: Run) -> str:
    """What is wrong with the samples that the steps of an epoch used; "" if nothing is."""
    used: dict[tuple[int, int], list[int]] = {}
    for one in run.of("step"):
        if one.get("samples") is None:
            return ""
        used.setdefault((one["which"], one["epoch"]), []).extend(one["samples"])
    last = max(used, default=(0, 0))
    for (which, epoch), samples in sorted(used.items()):
        twice = [sample for sample, times in collections.Counter(samples).items() if times > 1]
        if twice:
            return f"epoch {epoch} used sample {min(twice)} more than once"
        whole = which == 0 and ((which, epoch) != last or run.fact("short"))
        if whole and len(samples) != run.fact("samples"):
            return f"epoch {epoch} used {len(samples)} samples of {run.fact('samples')}"
    return ""


def is_a_sum(run: Run, reference: Run) -> bool:
    """Whether the script's loss is the sum over a batch: however a step is cut, the losses of all batches then add up to
    the same, and have another mean. In the first step all have the same parameters."""
    (total, mean), (of_reference, mean_of_reference) = _losses(run), _losses(reference)
    return _near(total, of_reference) and not _near(mean, mean_of_reference)


def _losses(run: Run) -> tuple[float, float]:
    """The sum and the mean of the losses of the first step's batches."""
    first = [one for one in run.of("step") if (one["which"], one["step"]) == (0, 1)]
    weight = sum(one["weight"] for one in first)
    return sum(one["losses"] for one in first), sum(one["loss"] * one["weight"] for one in first) / (weight or 1)


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 0.1 * abs(other)


def steps_done_again(run: Run) -> Iterator[str]:
    """Steps that were applied in two rounds, and trainings that went back."""
    rounds: dict[At, set[int]] = {}
    done: dict[int, int] = {}
    for one in sorted(run.of("begins", "step"), key=lambda note: note["at"]):
        which, step = one["which"], one["step"]
        if one["event"] == "step":
            rounds.setdefault((which, step), set()).add(one["round"])
            done[which] = max(step, done.get(which, 0))
        elif step < done.get(which, 0):
            yield f"after step {done[which]} the training continued from step {step}"
    for (_, step), of_step in sorted(rounds.items()):
        if len(of_step) > 1:
            yield f"step {step} was applied {len(of_step)} times"


def lost_processes(run: Run) -> list[str]:
    """The nodes whose worker was started again, although nothing had killed it."""
    pids: dict[str, list[int]] = {}
    for one in run.of("starts"):
        pids.setdefault(one["node"], []).append(one["pid"])
    killed = collections.Counter(one["node"] for one in run.of("dies"))
    return [node for node, of_node in pids.items() if len(of_node) > 1 + killed[node]]


def longest_pause(run: Run) -> Note | None:
    """The longest time that the script took between two steps."""
    return max(run.of("pause"), key=lambda one: one["seconds"], default=None)
