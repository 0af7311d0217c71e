"""What a training script may ask of the elastic-agent that started it. To start an agent, use the program
`elastic-agent`, or `python -m elastic_agent`. A script can train under an agent without this package. Only the standard
library is imported."""

from .errors import record
from .sampler import ElasticDistributedSampler, ElasticSampler
from .worker import (
    AgentError,
    assignment,
    available,
    barrier,
    commit_checkpoint,
    forming,
    give_up,
    keep_process,
    on_round_change,
    quiesce,
    ready,
    report_progress,
    request_round,
)

__all__ = [
    "AgentError",
    "ElasticDistributedSampler",
    "ElasticSampler",
    "assignment",
    "available",
    "barrier",
    "commit_checkpoint",
    "forming",
    "give_up",
    "keep_process",
    "on_round_change",
    "quiesce",
    "ready",
    "record",
    "report_progress",
    "request_round",
]
