"""Builds dist/: wheels, a tarball and Debian packages of the programs, for this machine's architecture or for that of
`--arch`. Run by `make dist`, from the sources as they lie here.

Linked by zig against glibc 2.28, so that one build runs on all systems of 2018 and later."""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import debian
import licences
import programs
import tarball
import wheel
from project import DIST, ROOT, Failure, Project


def main() -> None:
    began = time.monotonic()
    arguments = argparse.ArgumentParser(prog="packaging/dist", description="Builds dist/.")
    arguments.add_argument("--arch", help="for these machines: x86_64 or aarch64 [default: this machine's]")
    project = Project.read(arguments.parse_args().arch)
    # Files in archives have the time of the commit, so that the same sources make the same archives.
    os.environ["SOURCE_DATE_EPOCH"] = str(project.epoch)
    DIST.mkdir(exist_ok=True)
    for file in DIST.iterdir():
        if not project.is_of_others(file):
            file.unlink()
    with tempfile.TemporaryDirectory(prefix="elastic-dist-") as scratch:
        tree = Path(scratch) / "tree"
        built = programs.build(project, tree)
        programs.beside(built, tree)
        licences.write(project, tree / "share/doc/elastic/THIRD-PARTY-LICENCES")
        for file in ["LICENSE-MIT", "LICENSE-APACHE", "CHANGELOG.md", "proto/proto/jobs.proto"]:
            shutil.copy2(ROOT / file, tree / "share/doc/elastic")
        made = [tarball.make(project, tree), *debian.make(project, tree), *wheel.make(project, tree)]
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(DIST.iterdir())]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    for file in sorted(made):
        print(f"dist: {file.stat().st_size / 1e6:6.1f} MB  {file.relative_to(ROOT)}")
    print(f"dist: made of {project.commit} in {time.monotonic() - began:.0f} s")


try:
    main()
except Failure as failure:
    sys.exit(f"dist: {failure}")
except subprocess.CalledProcessError as error:
    sys.exit(f"dist: {' '.join(map(str, error.cmd))} failed with {error.returncode}: it says why above")
