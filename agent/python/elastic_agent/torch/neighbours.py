"""A copy of each rank's part of a sharded state in another node's memory, so that one node may be lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .slots import Slots, Snapshot

# Bytes that are sent at once.
_SENT = 64 << 20


def neighbours_of(rank: int, nodes: Sequence[int], parts: Sequence[int]) -> tuple[int, int] | str:
    """The rank that keeps a copy of this rank's part, and the rank whose part this one keeps; or why there is none.

    nodes: each rank's node. parts: which part of the state it holds. The copies of a node go to the next node, place by
    place.
    """
    of_node: dict[int, list[int]] = {}
    on_nodes: dict[int, set[int]] = {}
    for other, (node, part) in enumerate(zip(nodes, parts)):
        of_node.setdefault(node, []).append(other)
        on_nodes.setdefault(part, set()).add(node)
    if all(len(holders) > 1 for holders in on_nodes.values()):
        return "every part is on several nodes anyway"
    if len(of_node) == 1:
        return "there is one node"
    if len({len(ranks) for ranks in of_node.values()}) > 1:
        return "nodes have different numbers of workers: a lost node takes its parts with it"
    order = sorted(of_node)
    at, place = order.index(nodes[rank]), of_node[nodes[rank]].index(rank)
    return of_node[order[(at + 1) % len(order)]][place], of_node[order[at - 1]][place]


class Neighbours:
    """All ranks of a round: each keeps a copy of another's snapshots. Every rank calls `share` after each snapshot. It
    returns when all have that snapshot and its copy: no rank overwrites the one before while a part could be lost."""

    def __init__(self, group: Any, to: int | None, of: int | None) -> None:
        """group: of all ranks, over gloo. to: the rank that keeps this one's copy. of: the rank whose copy this one
        keeps. None: there are no copies."""
        self._group, self._to, self._of = group, to, of

    def share(self, own: Snapshot | None, copies: Slots | None) -> bool:
        """Sends a snapshot to the neighbour, and receives another rank's into `copies`. If a rank has no snapshot, none
        is copied. Returns False, for the end of sharing, if a rank has no memory (`copies` is None)."""
        if self._sum(copies is None):
            return False
        if self._sum(own is None) == 0 and self._to is not None:
            self._swap(own, copies)
        self._sum(False)
        return True

    def leave(self) -> None:
        """Ends it, here and for all ranks that still share."""
        group, self._group = self._group, None
        # The script may have ended all groups by itself.
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _sum(self, mine: bool) -> int:
        told = torch.tensor([int(mine)])
        dist.all_reduce(told, group=self._group)
        return int(told)

    def _swap(self, own: Snapshot, copies: Slots) -> None:
        head = torch.tensor(own.head)
        theirs = torch.zeros_like(head)
        self._send_and_receive(head, theirs)
        adopted = copies.adopt(tuple(theirs.tolist()))
        if adopted is None:
            # It must be taken all the same: the sender waits for that.
            self._send_and_receive(own.raw(), torch.empty(int(theirs[2:4].sum()), dtype=torch.uint8))
            raise RuntimeError(f"the part of rank {self._of} has no room in the memory of this node")
        place, room = adopted
        self._send_and_receive(own.raw(), room)
        copies.complete(place)

    def _send_and_receive(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        works = [dist.irecv(piece, self._of, group=self._group) for piece in received.split(_SENT)]
        works += [dist.isend(piece, self._to, group=self._group) for piece in sent.split(_SENT)]
        for work in works:
            work.wait()
