"""The wheels. One is the Python package with all programs: maturin makes it, and checks that its name says the truth
about the systems that it runs on. The programs are those that have been built already: maturin's cargo only says
where they are. The other is what `elastic-agent[compat]` adds."""

import json
import os
import shutil
from pathlib import Path

from project import DIST, PROGRAMS, ROOT, Failure, Project, run
from programs import GLIBC

PACKAGE = ROOT / "agent/python"
# By maturin's name for it: what lies in its scripts/ is installed beside the program, what lies in its data/ in the
# environment's own folder.
DATA = PACKAGE / "elastic_agent.data"


def make(project: Project, tree: Path) -> "list[Path]":
    said = {
        "reason": "compiler-artifact",
        "package_id": next(one["id"] for one in project.metadata["packages"] if one["name"] == "elastic-agent"),
        "manifest_path": str(ROOT / "agent/Cargo.toml"),
        "target": {
            "kind": ["bin"],
            "crate_types": ["bin"],
            "name": "elastic-agent",
            "src_path": str(ROOT / "agent/src/main.rs"),
            "edition": "2024",
        },
        "profile": {"opt_level": "3", "debuginfo": 0, "debug_assertions": False, "overflow_checks": False, "test": False},
        "features": [],
        "filenames": [str(tree / "bin/elastic-agent")],
        "executable": str(tree / "bin/elastic-agent"),
        "fresh": True,
    }
    cargo = tree.parent / "cargo"
    cargo.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(said)}\nEND\n")
    cargo.chmod(0o755)
    scripts = DATA / "scripts"
    scripts.mkdir(parents=True, exist_ok=True)
    try:
        for name in PROGRAMS:
            if name != "elastic-agent":
                shutil.copy2(tree / "bin" / name, scripts / name)
        # Its README is about unpacking it.
        shutil.copytree(tree / "share", DATA / "data/share", ignore=shutil.ignore_patterns("README"))
        maturin = shutil.which("maturin") or str(ROOT / ".venv/bin/maturin")
        policy = f"manylinux_{'_'.join(map(str, GLIBC))}"
        run(maturin, "build", "--quiet", "--locked", "--release", "--target", project.triple, "--compatibility", policy,
            "--out", DIST, cwd=PACKAGE, env={**os.environ, "CARGO": str(cargo)})
    finally:
        shutil.rmtree(DATA)
    run(project.tools / "python", "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--no-build-isolation", "--wheel-dir", DIST, PACKAGE / "compat")
    wheels = sorted(file for file in DIST.glob("*.whl") if not project.is_of_others(file))
    if len(wheels) != 2:
        raise Failure(f"{len(wheels)} wheels were made instead of two")
    return wheels
