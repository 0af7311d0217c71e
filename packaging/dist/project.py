"""What packages are made of: the sources, their version, and the machine that they are for."""

import dataclasses
import json
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DIST = ROOT / "dist"
PROGRAMS = ["elastic-agent", "elastic-coordinator", "elastic-trainer", "elasticctl"]
SUMMARY = "Fault-tolerant, elastic data-parallel training, coordinated by etcd"
# Debian's names of architectures.
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}


class Failure(Exception):
    """What cannot be done, and why, in one line."""


def run(*command: object, **options: object) -> str:
    """Runs a command, and returns what it prints."""
    done = subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True, **options)
    return done.stdout


@dataclasses.dataclass(frozen=True)
class Project:
    version: str
    commit: str
    # The commit's time.
    epoch: int
    # Who made it: name and address.
    maintainer: str
    # Cargo's target directory.
    target: Path
    # What they are for, as Rust and Python call it.
    machine: str
    # `cargo metadata`.
    metadata: dict
    # The compiler that makes programs for them, if it is not the one that cargo finds.
    rustc: "Path | None"

    @property
    def debian_architecture(self) -> str:
        return DEBIAN[self.machine]

    @property
    def triple(self) -> str:
        return f"{self.machine}-unknown-linux-gnu"

    @property
    def crosses(self) -> bool:
        """Whether they are for other machines than this one."""
        return self.machine != platform.machine()

    @property
    def tools(self) -> Path:
        """Where scripts/setup.sh has put what packages are made with."""
        folder = self.target / "packaging/bin"
        if not (folder / "cargo-zigbuild").is_file():
            raise Failure(f"{folder / 'cargo-zigbuild'} is missing: run scripts/setup.sh dist")
        return folder

    def with_tools(self) -> "dict[str, str]":
        """This process's environment, with these tools on the PATH."""
        compiler = {"RUSTC": str(self.rustc)} if self.rustc else {}
        return {**os.environ, **compiler, "PATH": f"{self.tools}:{os.environ['PATH']}"}

    def is_of_others(self, file: Path) -> bool:
        """Whether a file of dist/ is of this version, and for other machines only."""
        words = [word for machine, debian in DEBIAN.items() if machine != self.machine for word in (machine, debian)]
        return self.version in file.name and any(word in file.name for word in words)

    @staticmethod
    def read(machine: "str | None") -> "Project":
        here = platform.machine()
        if platform.system() != "Linux" or here not in DEBIAN:
            raise Failure(
                f"packages are made on Linux on {' or '.join(DEBIAN)}, and this is {platform.system()} on {here}"
            )
        machine = machine or here
        if machine not in DEBIAN:
            raise Failure(f"packages are made for {' or '.join(DEBIAN)}, not for {machine}")
        triple = f"{machine}-unknown-linux-gnu"
        arguments = ["--format-version", "1", "--locked", "--filter-platform", triple]
        metadata = json.loads(run("cargo", "metadata", *arguments, cwd=ROOT))
        target = Path(metadata["target_directory"])
        rustc = None
        if machine != here and not Path(run("rustc", "--print", "target-libdir", "--target", triple).strip()).is_dir():
            rustc = target / f"packaging/rust-{machine}/bin/rustc"
            if not rustc.is_file():
                raise Failure(
                    f"Rust's standard library for {triple} is not installed: rustup target add {triple}; "
                    f"or on Debian, scripts/setup.sh dist {machine}"
                )
        versions = {one["name"]: one["version"] for one in metadata["packages"] if one["source"] is None}
        return Project(
            version=versions["elastic-agent"],
            commit=run("git", "describe", "--always", "--dirty", "--tags", cwd=ROOT).strip(),
            epoch=int(run("git", "log", "-1", "--format=%ct", cwd=ROOT)),
            maintainer=run("git", "log", "-1", "--format=%an <%ae>", cwd=ROOT).strip(),
            target=target,
            machine=machine,
            metadata=metadata,
            rustc=rustc,
        )
