"""`python -m elastic_agent.accelerate launch ...`: Accelerate's command, whose workers elastic-agent runs. Accelerate
begins torchrun by a call in its own process, which no command of that name can stand in for."""

from __future__ import annotations

import argparse
import sys

from .program import become


def arguments_of(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> list[str]:
    """The command line that `parser` reads as `parsed`, without what is a default."""
    options, rest = [], []
    for action in parser._actions:
        value = getattr(parsed, action.dest, argparse.SUPPRESS)
        if not action.option_strings:
            rest += value if isinstance(value, list) else [] if value in (None, argparse.SUPPRESS) else [str(value)]
        elif value not in (argparse.SUPPRESS, action.default, None):
            flag = max(action.option_strings, key=len)
            options.append(flag if action.nargs == 0 else f"{flag}={value}")
    return options + rest


def main() -> None:
    """Runs Accelerate's command with this process's arguments."""
    import torch.distributed.run as torchrun

    try:
        from accelerate.commands.accelerate_cli import main as accelerate
    except ImportError as error:
        sys.exit(f"elastic_agent.accelerate: Accelerate is not there ({error}): pip install accelerate")
    torchrun.run = lambda parsed: become(arguments_of(torchrun.get_args_parser(), parsed), "torchrun")
    sys.argv[0] = "accelerate"
    accelerate()


if __name__ == "__main__":
    main()
