"""PyTorch training that lives through changes of its group: survivors keep their process, newcomers get the state from
their peers, and what all have lost from the agent's memory. Importing this imports torch."""

from ..batches import ElasticBatchSampler
from ..shards import Shards
from .furthest import share_furthest
from .replica import node_mesh
from .session import Session
from .snapshots import Resumed, Snapshots

__all__ = ["ElasticBatchSampler", "Resumed", "Session", "Shards", "Snapshots", "node_mesh", "share_furthest"]
