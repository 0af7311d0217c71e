"""`python -m elastic_agent.run`: the program `elastic-agent`, where a command names torchrun as
`torch.distributed.run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from .program import become


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Becomes `elastic-agent` with these arguments, else with this process's own."""
    become(sys.argv[1:] if args is None else args)


if __name__ == "__main__":
    main()
