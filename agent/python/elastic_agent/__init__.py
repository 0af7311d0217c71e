"""What a training script may ask of the elastic-agent that started it. Not for starting one: that is the program
`elastic-agent`. Nothing here is needed to train under an agent, and nothing but the standard library is imported."""

from .sampler import ElasticSampler
from .worker import (
    AgentError,
    assignment,
    available,
    barrier,
    commit_checkpoint,
    forming,
    keep_process,
    on_round_change,
    quiesce,
    ready,
    report_progress,
)

__all__ = [
    "AgentError",
    "ElasticSampler",
    "assignment",
    "available",
    "barrier",
    "commit_checkpoint",
    "forming",
    "keep_process",
    "on_round_change",
    "quiesce",
    "ready",
    "report_progress",
]
