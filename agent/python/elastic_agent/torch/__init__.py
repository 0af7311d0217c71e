"""PyTorch training that lives through changes of its group: survivors keep their process, newcomers get the state from
their peers. Importing this imports torch."""

from ..batches import ElasticBatchSampler
from .session import Session

__all__ = ["ElasticBatchSampler", "Session"]
