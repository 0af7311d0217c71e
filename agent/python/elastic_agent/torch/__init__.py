"""PyTorch training that lives through changes of its group: survivors keep their process, newcomers get the state from
their peers, and what all have lost from the agent's memory. Importing this imports torch."""

from ..batches import ElasticBatchSampler
from ..shards import Shards
from .furthest import share_furthest
from .loop import Loop
from .replica import node_mesh, replica_mesh
from .session import Session
from .snapshots import Resumed, Snapshots
from .state import State
from .streams import Streams

__all__ = [
    "ElasticBatchSampler",
    "Loop",
    "Resumed",
    "Session",
    "Shards",
    "Snapshots",
    "State",
    "Streams",
    "node_mesh",
    "replica_mesh",
    "share_furthest",
]
