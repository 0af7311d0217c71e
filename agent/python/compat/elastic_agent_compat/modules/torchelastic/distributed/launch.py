"""`python -m torchelastic.distributed.launch`, with the flags and defaults of torchelastic 0.2.2."""

from __future__ import annotations

import sys
from typing import NoReturn

from elastic_agent.program import become


def main() -> NoReturn:
    """Becomes elastic-agent in its place."""
    become(sys.argv[1:], "torchelastic.distributed.launch")


if __name__ == "__main__":
    main()
