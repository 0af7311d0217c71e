"""Chooses the state that training continues from, among those that ranks hold and the committed checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .boxes import Layout


@dataclass(frozen=True)
class Offer:
    """A state that a rank holds, and the place of the rank that made it: of a copy it is another rank."""

    step: int
    round: int = 0
    sharded: bool = False
    rank: int = 0
    world_size: int = 1
    # Of a sharded state, if its tensors are all divided alike.
    layout: Layout | None = None


@dataclass(frozen=True)
class Choice:
    """What to continue from: a state in memory, the committed checkpoint, or neither."""

    source: str
    step: int = 0
    round: int = 0
    # The ranks that have it, if each has all of it.
    holders: tuple[int, ...] = ()
    # Of a sharded state the rank that gives each part. Without them each rank takes its own.
    senders: tuple[int, ...] | None = None
    why: str = ""


def choose(
    offers: list[list[Offer]],
    committed: int | None,
    newer_than: int = 0,
    layouts: Sequence[Layout | None] = (),
) -> Choice:
    """The same on every rank. offers: what each rank holds. committed: the step of the checkpoint on disk. newer_than:
    the step of a checkpoint of the script's own. layouts: of each rank now, if the model is sharded."""
    replicated = [((one.step, one.round), rank) for rank, held in enumerate(offers) for one in held if not one.sharded]
    sharded = sorted({(one.step, one.round) for held in offers for one in held if one.sharded}, reverse=True)
    found, why = None, "no rank holds a snapshot"
    if replicated:
        newest = max(replicated)[0]
        found = Choice("memory", *newest, tuple(rank for key, rank in replicated if key == newest))
    for step, round_ in sharded:
        senders, missing = _senders(offers, (step, round_), layouts)
        if not missing:
            found = Choice("memory", step, round_, senders=senders)
            break
        if (step, round_) == sharded[0]:
            why = f"of the snapshot of step {step}, {missing}"
    on_disk = max(committed or 0, newer_than)
    if found and found.step >= on_disk:
        return found
    if found:
        why = f"the newest snapshot in memory is of step {found.step}, and a checkpoint is of step {on_disk}"
    if committed is not None and committed >= newer_than:
        return Choice("checkpoint", committed, why=why)
    return Choice("nothing", why=why)


def _senders(
    offers: list[list[Offer]], key: tuple[int, int], layouts: Sequence[Layout | None]
) -> tuple[tuple[int, ...] | None, str]:
    """Who gives each part of a sharded snapshot, None if each rank has its own; and what is missing, if anything is."""
    held = [[one for one in of_rank if (one.step, one.round) == key] for of_rank in offers]
    without = [rank for rank, parts in enumerate(held) if not any(_is_own(one, rank, layouts) for one in parts)]
    if not without:
        return None, ""
    if None in layouts or any(one.layout is None for parts in held for one in parts):
        reason = "its tensors lie on several device meshes, so only a group like the one that made it can resume"
        return None, f"rank {without[0]} does not hold its own part, and {reason}"
    holders: dict[int, list[int]] = {}
    for rank, parts in enumerate(held):
        for one in parts:
            holders.setdefault(one.layout.part, []).append(rank)
    whole = next(one.layout.parts for parts in held for one in parts)
    lost = [str(part) for part in range(whole) if part not in holders]
    if lost:
        return None, f"no rank holds part {', '.join(lost)} of the {whole} (counted from 0)"
    load = [0] * len(offers)
    senders = []
    for part in range(whole):
        rank = min(holders[part], key=lambda one: (load[one], one))
        load[rank] += 1
        senders.append(rank)
    return tuple(senders), ""


def _is_own(one: Offer, rank: int, layouts: Sequence[Layout | None]) -> bool:
    return one.rank == rank and one.world_size == len(layouts) and one.layout == layouts[rank]
