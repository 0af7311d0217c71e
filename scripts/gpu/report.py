"""What steps print for the report, and what trainings write as they go."""

import json
from pathlib import Path
from typing import List


def result(**figures: object) -> None:
    """Prints figures that the report shows."""
    print("result: " + json.dumps(figures), flush=True)


def traced(path: Path) -> "List[dict]":
    """The steps of a trace that are written so far."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [line for line in map(json.loads, lines) if line["event"] == "step"]
