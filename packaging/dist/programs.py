"""The programs themselves: built, stripped, and checked for their requirements on the system."""

import json
import os
import re
import shutil
from pathlib import Path

from project import PROGRAMS, ROOT, Failure, Project, run

# The oldest system that they run on: Debian 10, Ubuntu 18.10, RHEL 8 and their like. Wheels call it manylinux_2_28.
# Not musl: a static program cannot open shared libraries, so the trainer would have no GPU (CUDA, NVRTC, cuBLASLt, NCCL)
# and the agent could not check GPUs (NVML). musl also looks host names up without nsswitch.conf, so an agent and its
# workers could find different addresses. PyTorch's wheels need the same glibc.
GLIBC = (2, 28)
# What they may ask of it: glibc's own libraries.
LOADERS = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
LIBRARIES = {"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"} | LOADERS


def build(project: Project, tree: Path) -> "dict[str, Path]":
    """Builds the programs and puts them into the tree's bin/, without symbols. Returns what cargo has built."""
    glibc = ".".join(map(str, GLIBC))
    command = ["cargo", "zigbuild", "--release", "--locked", "--message-format=json-render-diagnostics"]
    command += ["--target", f"{project.triple}.{glibc}", "--bins"]
    for package in ["elastic-agent", "elastic-coordinator", "elastic-program"]:
        command += ["--package", package]
    # It runs here, and writes what lies beside the programs.
    writer = ["cargo", "build", "--release", "--locked", "--message-format=json-render-diagnostics"]
    writer += ["--package", "elastic-packaging"]
    if not project.crosses:
        command += writer[-2:]
    # Messages name sources by where they lie: here, and in cargo's home. Neither is anybody's business.
    cargo_home = os.environ.get("CARGO_HOME", Path.home() / ".cargo")
    flags = f"{os.environ.get('RUSTFLAGS', '')} --remap-path-prefix={cargo_home}=cargo --remap-path-prefix={ROOT}=elastic"
    environment = {**project.with_tools(), "RUSTFLAGS": flags.strip()}
    if project.crosses:
        # This machine's strip knows no other's programs.
        environment["CARGO_PROFILE_RELEASE_STRIP"] = "symbols"
    messages = run(*command, cwd=ROOT, env=environment)
    if project.crosses:
        messages += run(*writer, cwd=ROOT)
    artifacts = [json.loads(line) for line in messages.splitlines() if line.startswith("{")]
    built = {one["target"]["name"]: Path(one["executable"]) for one in artifacts if one.get("executable")}
    (tree / "bin").mkdir(parents=True)
    for name in PROGRAMS:
        program = tree / "bin" / name
        if project.crosses:
            shutil.copy2(built[name], program)
        else:
            run("strip", "-o", program, built[name])
        program.chmod(0o755)
        newest, libraries = needs(program)
        size = program.stat().st_size / 1e6
        print(f"dist: {size:6.1f} MB  {name}, glibc {'.'.join(map(str, newest))}, {' '.join(sorted(libraries))}")
        if newest > GLIBC or libraries - LIBRARIES:
            raise Failure(f"{name} needs more than glibc {glibc} has: it would not run where the packages say")
    return built


def beside(built: "dict[str, Path]", tree: Path) -> None:
    """What lies beside the programs: manual pages and completions."""
    run(built["elastic-packaging"], tree)
    (tree / "share/doc/elastic").mkdir(parents=True)


def needs(program: Path) -> "tuple[tuple[int, ...], set[str]]":
    """The newest version of glibc and the libraries that a program must find."""
    told = run("readelf", "--version-info", "--dynamic", "--wide", program)
    versions = [tuple(map(int, version.split("."))) for version in re.findall(r"Name: GLIBC_(\d+(?:\.\d+)+)", told)]
    return max(versions), set(re.findall(r"\(NEEDED\)\s+Shared library: \[(.+?)\]", told))
