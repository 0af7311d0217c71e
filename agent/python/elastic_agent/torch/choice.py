"""Which of the snapshots that ranks still hold training goes on from. How they are read and sent is left to others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Offer:
    """A whole snapshot that a rank holds, and what that rank was when it was made."""

    step: int
    round: int
    sharded: bool
    rank: int
    world_size: int


@dataclass(frozen=True)
class Choice:
    """What to go on from: the snapshot of a step and round in memory, the committed checkpoint, or neither."""

    source: str
    step: int = 0
    round: int = 0
    # The rank whose copy all take. Of a sharded state each takes its own.
    holder: int | None = None
    why: str = ""


def choose(offers: list[list[Offer]], committed: int | None, newer_than: int = 0) -> Choice:
    """offers: what each rank holds. committed: the step of the checkpoint on disk. newer_than: the step of a checkpoint of
    the script's own. The same on every rank."""
    replicated = [(one.step, one.round, -rank) for rank, held in enumerate(offers) for one in held if not one.sharded]
    sharded = {(one.step, one.round) for held in offers for one in held if one.sharded}
    whole = [key for key in sharded if not _missing(offers, key)]
    found, why = None, "no rank holds a snapshot"
    if replicated:
        step, round_, rank = max(replicated)
        found = Choice("memory", step, round_, -rank)
    elif whole:
        found = Choice("memory", *max(whole))
    elif sharded:
        newest = max(sharded)
        why = f"of the snapshot of step {newest[0]}, {_missing(offers, newest)}"
    on_disk = max(committed or 0, newer_than)
    if found and found.step >= on_disk:
        return found
    if found:
        why = f"the newest snapshot in memory is of step {found.step}, and a checkpoint is of step {on_disk}"
    if committed is not None and committed >= newer_than:
        return Choice("checkpoint", committed, why=why)
    return Choice("nothing", why=why)


def _missing(offers: list[list[Offer]], key: tuple[int, int]) -> str:
    """Why the parts of a sharded snapshot are not all there. Nothing if they are."""
    for rank, held in enumerate(offers):
        parts = [one for one in held if (one.step, one.round) == key]
        if not parts:
            return f"rank {rank} holds no part"
        if parts[0].world_size != len(offers):
            return f"the parts are those of {parts[0].world_size} ranks, and there are {len(offers)} now"
        if parts[0].rank != rank:
            return f"rank {rank} holds the part of rank {parts[0].rank}"
    return ""
