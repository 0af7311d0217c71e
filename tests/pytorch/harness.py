"""What the scripts here have in common: they tell the test where they are, and wait until the test has acted.

A line in `starts` says which worker this is, in the words of the tests' shell workers, so that the same checks are made
of its round. Lines of JSON in `trace` tell all else.
"""

import json
import os
import pathlib
import sys
import time

DIR = pathlib.Path(os.environ["TEST_DIR"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# torchrun has neither. There is one node then, and the restarts count the rounds.
NODE = os.environ.get("ELASTIC_NODE", "node")
ROUND = int(os.environ.get("ELASTIC_ROUND", os.environ["TORCHELASTIC_RESTART_COUNT"]))


def append(path: pathlib.Path, line: str) -> None:
    # One write, so that lines of several processes do not mix.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode() + b"\n")
    finally:
        os.close(file)


def report_start() -> None:
    """Says that this worker has started. Called before the slow import of torch."""
    names = "RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE TORCHELASTIC_RESTART_COUNT".split()
    master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    append(DIR / "starts", " ".join([NODE, str(ROUND), *(os.environ[name] for name in names), str(os.getpid()), master]))


def trace(event: str, **facts) -> None:
    """Adds to the trace."""
    place = {"node": NODE, "round": ROUND, "rank": RANK, "size": WORLD_SIZE}
    append(DIR / "trace", json.dumps({"event": event, **place, **facts}))


def is_set(word: str) -> bool:
    """Whether the test has said `word`."""
    return (DIR / word).exists()


def wanted(word: str) -> int:
    """The number that the test has written to `word`: without an end until then."""
    return int((DIR / word).read_text()) if is_set(word) else 1_000_000


def wait_for(word: str, seconds: float = 60) -> None:
    """Waits until the test has said `word`."""
    until = time.monotonic() + seconds
    while not is_set(word):
        if time.monotonic() > until:
            raise TimeoutError(f"no process said {word!r} within {seconds} s")
        time.sleep(0.02)


def digits(count: int):
    """The first `count` of the project's handwritten digits: pixels in 0..1, and what they show."""
    import gzip

    import torch

    path = pathlib.Path(__file__).parents[2] / "trainer" / "models" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as lines:
        rows = torch.tensor([[float(cell) for cell in line.split(",")] for line, _ in zip(lines, range(count))])
    return rows[:, :64] / 16, rows[:, 64].long()


def exit_now() -> None:
    """Ends the process, whose work is done. While the interpreter shuts down, PyTorch's threads sometimes abort it
    ("terminate called without an active exception"), which no launcher can help."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
