"""What kernels of a training take, and what cuBLASLt chooses, as NVIDIA's own tools tell: kernel_times.py ncu|choices
TRAINER whole|small [DEVICE]. Our own times, by events and the clock, are those of the test program."""

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import DefaultDict, Dict, Iterable, List, Optional, Tuple

from report import result, traced

SHAPES = {"whole": "--size gpt2 --batch 32 --shards 1", "small": "--batch 4 --shards 1"}
# Kernels that are profiled: the first steps launch them one by one, before graphs are captured.
LAUNCHES = 1500
ROWS = 25


def training(trainer: str, size: str, device: str, folder: Path) -> "List[str]":
    flags = f"gpt {SHAPES[size]} --windows 32 --epochs 4 --precision bf16 --snapshot-every 0 --device {device}"
    return [trainer, *flags.split(), "--trace", str(folder / "trace")]


def runs(command: "List[str]", folder: Path, steps: int, seconds: float, variables: "Dict[str, str]" = {}) -> str:
    """Runs a training until it has done this many steps, its tool ends it, or it takes too long. Returns its log."""
    end = time.monotonic() + seconds
    with open(folder / "log", "w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **variables})
    try:
        while child.poll() is None and time.monotonic() < end and len(traced(folder / "trace")) < steps:
            time.sleep(0.1)
    finally:
        # The tools write their results when the program under them gets a signal to end.
        child.terminate()
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    return (folder / "log").read_text(errors="replace")


def summed(lines: "Iterable[str]") -> "List[Tuple[str, int, float]]":
    """Reads Nsight Compute's CSV: each kernel, its launches and its microseconds in total, longest first."""
    units = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6}
    rows = [line for line in lines if line.startswith('"')]
    times: "DefaultDict[str, List[float]]" = defaultdict(list)
    for row in csv.DictReader(rows):
        if row.get("Metric Name") == "gpu__time_duration.sum":
            value = float(row["Metric Value"].replace(",", ""))
            times[row["Kernel Name"]].append(value * units[row["Metric Unit"]])
    return sorted(((name, len(each), sum(each)) for name, each in times.items()), key=lambda row: -row[2])


def chosen(lines: "Iterable[str]") -> "Dict[str, int]":
    """Reads cuBLASLt's log: the algorithms of its products, and how often each was chosen."""
    counts: "DefaultDict[str, int]" = defaultdict(int)
    for line in lines:
        algorithm = re.search(r"algo=\[([^\]]*)\]", line)
        if algorithm and "cublasLtMatmul]" in line:
            shapes = re.findall(r"([ABCD]desc)=\[([^\]]*)\]", line)
            counts[" ".join(f"{name} {what}" for name, what in shapes) + " by " + algorithm.group(1)] += 1
    return dict(counts)


def tool(name: str, *folders: str) -> "Optional[str]":
    """Where a tool is: on the path, or in one of these folders."""
    found = [str(Path(folder, name)) for folder in folders if Path(folder, name).exists()]
    return shutil.which(name) or next(iter(found), None)


def find_ncu() -> "Optional[str]":
    versions = sorted(map(str, Path("/opt/nvidia/nsight-compute").glob("*")), reverse=True)
    return tool("ncu", "/usr/local/cuda/bin", *versions)


def by_ncu(trainer: str, size: str, device: str, folder: Path) -> int:
    ncu = find_ncu() or "ncu"
    # The clocks stay unchanged, since the machine may be someone else's.
    flags = f"--clock-control none --metrics gpu__time_duration.sum --csv --launch-count {LAUNCHES} --kill yes"
    tool = [ncu, *flags.split(), "--log-file", str(folder / "ncu.csv")]
    said = runs(tool + training(trainer, size, device, folder), folder, 4, 75)
    lines = (folder / "ncu.csv").read_text(errors="replace").splitlines() if (folder / "ncu.csv").exists() else []
    print(said[-4000:] + "\n" + "\n".join(lines[:40]))
    rows = summed(lines)
    everything = sum(row[2] for row in rows)
    for name, count, took in rows[:ROWS]:
        each, share = round(took / count, 2), f"{took / everything:.1%}"
        result(kernel=name[:90], launches=count, us_in_all=round(took, 1), us_each=each, share=share)
    result(kernels=len(rows), launches=sum(row[1] for row in rows), ms_in_all=round(everything / 1e3, 2))
    return 0 if rows else 1


def by_cublaslt(trainer: str, size: str, device: str, folder: Path) -> int:
    variables = {"CUBLASLT_LOG_LEVEL": "5", "CUBLASLT_LOG_FILE": str(folder / "cublaslt")}
    said = runs(training(trainer, size, device, folder), folder, 2, 60, variables)
    lines = [line for path in folder.glob("cublaslt*") for line in path.read_text(errors="replace").splitlines()]
    products = [line[:1000] for line in lines if "Matmul" in line]
    print(said[-3000:] + "\n" + "\n".join((products or lines)[:60]))
    counts = chosen(lines)
    for what, count in sorted(counts.items(), key=lambda item: -item[1])[:ROWS]:
        result(product=what[:600], times=count)
    result(lines=len(lines), products=len(counts))
    return 0 if counts else 1


def main() -> int:
    what, trainer, size, device = sys.argv[1:5]
    with tempfile.TemporaryDirectory() as folder:
        return {"ncu": by_ncu, "choices": by_cublaslt}[what](trainer, size, device, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
