"""Other launchers' names for elastic-agent."""

from __future__ import annotations

import sys
from typing import NoReturn

from elastic_agent.program import become


def torchrun() -> NoReturn:
    """The command `torchrun`."""
    become(sys.argv[1:], "torchrun")
