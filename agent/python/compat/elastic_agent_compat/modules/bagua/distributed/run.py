"""`python -m bagua.distributed.run`, with the flags and defaults of torchrun, which it was made from."""

from __future__ import annotations

import sys
from typing import NoReturn

from elastic_agent.program import become


def main() -> NoReturn:
    """Becomes elastic-agent in its place."""
    become(sys.argv[1:], "bagua.distributed.run")


if __name__ == "__main__":
    main()
