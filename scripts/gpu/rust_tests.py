"""Runs tests of built test programs, each in a process of its own, several at once: one that crashes, or that warns,
hides no other. rust_tests.py PROGRAM[,PROGRAM] FILTER... [--skip WORD] [--jobs N] [--limit SECONDS] [--under COMMAND]"""

import argparse
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import List, Tuple

from report import result

# Lines of a test's output that hold what it measured.
MEASURED = re.compile(r"\d (GB/s|TFLOP/s|ms)\b")


def names(program: str, filters: "List[str]", skipped: "List[str]") -> "List[str]":
    """The tests whose names begin with one of the filters and contain nothing that is skipped."""
    command = [program, "--list", "--format", "terse"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    all_names = [line[: -len(": test")] for line in told.stdout.splitlines() if line.endswith(": test")]
    wanted = [name for name in all_names if any(name.startswith(one) for one in filters)]
    return [name for name in wanted if not any(word in name for word in skipped)]


def run(command: "List[str]", seconds: float) -> "Tuple[bool, str, float]":
    began = time.monotonic()
    try:
        told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds)
        well, said = told.returncode == 0, told.stdout
        last = "" if well else f"exit code {told.returncode}\n"
    except subprocess.TimeoutExpired as error:
        well, said, last = False, error.stdout or b"", f"ended at its limit of {seconds:.0f} s\n"
    except OSError as error:
        well, said, last = False, b"", f"{command[0]} cannot be run: {error}\n"
    return well, said.decode(errors="replace") + last, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", help="separated by commas")
    parser.add_argument("filters", nargs="+")
    parser.add_argument("--skip", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("--under", default="", help="a command that each test runs under")
    arguments = parser.parse_args()
    programs = arguments.programs.split(",")
    found = [(one, name) for one in programs for name in names(one, arguments.filters, arguments.skip)]
    under = shlex.split(arguments.under)
    command = lambda program, name: [*under, program, "--exact", name, "--nocapture", "--test-threads", "1"]
    failed = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = [(name, pool.submit(run, command(one, name), arguments.limit)) for one, name in found]
        for name, future in running:
            well, said, took = future.result()
            print(f"---- {name}: {'passed' if well else 'FAILED'}, {took:.1f} s\n{said.strip()}", flush=True)
            failed += [] if well else [name]
            for line in said.splitlines():
                if MEASURED.search(line):
                    result(measured=line.strip())
            if not well:
                result(failed=name, why=cause(said))
    result(tests=len(found), failed=len(failed))
    # If no test is found, the filter is wrong.
    return 1 if failed or not found else 0


def cause(said: str) -> str:
    """The line that says why a test failed: after the place of the panic, or a tool's count."""
    lines = said.splitlines()
    for place, line in enumerate(lines):
        if "panicked at" in line:
            return " ".join(line for line in lines[place + 1 : place + 3] if not line.startswith("exit code"))[:400]
    counted = [line for line in lines if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
    return (counted or lines or ["it said nothing"])[-1][:400]


if __name__ == "__main__":
    sys.exit(main())
