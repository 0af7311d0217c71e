"""Makes gpu-kit/: all that a machine with a GPU needs to run our programs and tests there, where it has no cargo and no
network. Run by `make gpu-kit`; what runs the kit is scripts/gpu.sh."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The newest version that a program may need if it is to run on all systems of 2022 and later.
NEWEST_GLIBC = (2, 34)
# With the sources it has to fit through narrow ways.
MOST_BYTES = 40_000_000
PROGRAMS = ["elastic-trainer", "elastic-agent"]
# Tests that run on a GPU: the package that has them, and their program there.
TESTS = {"elastic-cuda": "cuda", "elastic-program": "gpu"}
# By the folders they lie in.
SCRIPTS = {
    "scripts": ["gpu.sh", "gpu"],
    "tests": ["pytorch/bench_gpu.py", "pytorch/models.py", "pytorch/trains_by_nccl.py"],
    "agent/python": ["elastic_agent"],
}


def built(*arguments: str) -> "dict[str, Path]":
    """The executables that cargo builds, by their targets' names."""
    command = ["cargo", *arguments, "--release", "--locked", "--message-format=json-render-diagnostics"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"gpu-kit: {' '.join(command)} failed")
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {one["target"]["name"]: Path(one["executable"]) for one in messages if one.get("executable")}


def glibc_of(program: Path) -> "tuple[int, ...]":
    """The newest version of glibc that it must find."""
    readelf = ["readelf", "--version-info", "--wide", str(program)]
    told = subprocess.run(readelf, check=True, capture_output=True, text=True)
    versions = re.findall(r"Name: GLIBC_(\d+(?:\.\d+)+)", told.stdout)
    return max(tuple(map(int, version.split("."))) for version in versions)


def main() -> None:
    kit = ROOT / "gpu-kit"
    programs = built("build", "--package", "elastic-program", "--package", "elastic-agent", "--bins")
    files = {name: programs[name] for name in PROGRAMS}
    for package, name in TESTS.items():
        files[f"{name}-tests"] = built("test", "--package", package, "--test", name, "--no-run")[name]
    shutil.rmtree(kit, ignore_errors=True)
    kit.mkdir()
    newest = (0,)
    for name, program in files.items():
        subprocess.run(["strip", "-o", str(kit / name), str(program)], check=True)
        glibc = glibc_of(kit / name)
        newest = max(newest, glibc)
        print(f"gpu-kit: {name}: {(kit / name).stat().st_size / 1e6:.1f} MB, glibc {'.'.join(map(str, glibc))}")
    for folder, script in ((folder, script) for folder, scripts in SCRIPTS.items() for script in scripts):
        source, target = ROOT / folder / script, kit / script
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    made = {"commit": commit.stdout.strip(), "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}
    (kit / "kit.json").write_text(json.dumps(made) + "\n")
    size = sum(path.stat().st_size for path in kit.rglob("*") if path.is_file())
    print(f"gpu-kit: {kit} has {size / 1e6:.1f} MB and needs glibc {'.'.join(map(str, newest))}, of {made['commit']}")
    if newest > NEWEST_GLIBC:
        sys.exit(f"gpu-kit: that is newer than glibc {'.'.join(map(str, NEWEST_GLIBC))}: build on an older system")
    if size > MOST_BYTES:
        sys.exit(f"gpu-kit: that is more than {MOST_BYTES / 1e6:.0f} MB")


main()
