"""Writes the newest snapshot of a memory that no worker is left to go on from. The agent runs this, and commits what it
prints.

    python -m elastic_agent.torch.rescue --dir FOLDER --after STEP < MEMORY
"""

from __future__ import annotations

import argparse
import json
import mmap
import pathlib
import sys

from . import checkpoints
from .slots import Slots


def main() -> None:
    """Prints the checkpoint as one line of JSON; nothing if the memory has nothing newer than step `--after`."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--dir", required=True, type=pathlib.Path, help="the folder of the checkpoints")
    options.add_argument("--after", required=True, type=int, help="the step that is committed")
    arguments = options.parse_args()
    for snapshot in Slots(mmap.mmap(sys.stdin.fileno(), 0)).whole():
        if snapshot.step <= arguments.after:
            continue
        try:
            snapshot.check()
        except ValueError as error:
            print(f"{error}; it is skipped", file=sys.stderr)
            continue
        path = arguments.dir / f"{checkpoints.name_of(snapshot.step, snapshot.round, '-rescued')}.pt"
        digest = checkpoints.write(path, snapshot.state())
        print(json.dumps({"step": snapshot.step, "path": str(path), "digest": digest}))
        return


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"the snapshot is not written: {error}")
