"""The Debian packages, made by dpkg-deb. Their control files and scripts are in packaging/debian/."""

import email.utils
import gzip
import hashlib
import shutil
from pathlib import Path

from project import DIST, ROOT, Project, run
from programs import GLIBC

SOURCES = ROOT / "packaging/debian"
# What is in which package.
PACKAGES = {
    "elastic-train-agent": (["elastic-agent", "elastic-trainer"], "elastic-train-agent@.service"),
    "elastic-train-coordinator": (["elastic-coordinator", "elasticctl"], "elastic-train-coordinator.service"),
}


def make(project: Project, tree: Path) -> "list[Path]":
    return [package(project, tree, name, *content) for name, content in PACKAGES.items()]


def package(project: Project, tree: Path, name: str, programs: "list[str]", unit: str) -> Path:
    root = tree.parent / name
    for file in sorted(path for path in tree.rglob("*") if path.is_file()):
        place = file.relative_to(tree)
        # A command's page has its program's name before its own; a completion's name begins by shell's custom.
        owner = place.name.removeprefix("_").split(".")[0]
        if any(owner == program or owner.startswith(f"{program}-") for program in programs):
            target = root / "usr" / place
            target.parent.mkdir(parents=True, exist_ok=True)
            if place.suffix == ".1":
                packed(file.read_bytes(), target.with_name(f"{target.name}.gz"))
            else:
                shutil.copy2(file, target)
    documents(project, tree, root / "usr/share/doc" / name)
    if "elastic-coordinator" in programs:
        shutil.copy2(tree / "share/doc/elastic/jobs.proto", root / "usr/share/doc" / name)
    text = (ROOT / "deploy/systemd" / unit).read_text().replace("/usr/local/bin/", "/usr/bin/")
    (root / "usr/lib/systemd/system").mkdir(parents=True)
    (root / "usr/lib/systemd/system" / unit).write_text(text)
    (root / "etc/elastic").mkdir(parents=True)
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
    control(project, name, root)
    file = DIST / f"{name}_{project.version}_{project.debian_architecture}.deb"
    run("dpkg-deb", "--root-owner-group", "-Zxz", "--build", root, file)
    return file


def documents(project: Project, tree: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    ours = (ROOT / "LICENSE-MIT").read_text()
    theirs = "Or, as you choose, under the Apache License 2.0: /usr/share/common-licenses/Apache-2.0\n"
    libraries = "The libraries that are part of the programs: THIRD-PARTY-LICENCES.gz beside this file.\n"
    (folder / "copyright").write_text(f"{ours}\n{theirs}\n{libraries}")
    packed((ROOT / "CHANGELOG.md").read_bytes(), folder / "NEWS.gz")
    packed((tree / "share/doc/elastic/THIRD-PARTY-LICENCES").read_bytes(), folder / "THIRD-PARTY-LICENCES.gz")
    # In the form that Debian's tools read.
    when = email.utils.formatdate(project.epoch)
    entry = f"{folder.name} ({project.version}) unstable; urgency=medium\n\n  * NEWS.gz says what is new.\n\n"
    packed(f"{entry} -- {project.maintainer}  {when}\n".encode(), folder / "changelog.gz")


def control(project: Project, name: str, root: Path) -> None:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in files)
    sums = [f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(root)}\n" for path in files]
    folder = root / "DEBIAN"
    folder.mkdir()
    words = {
        "version": project.version,
        "architecture": project.debian_architecture,
        "maintainer": project.maintainer,
        "size": size // 1024 + 1,
        "glibc": ".".join(map(str, GLIBC)),
    }
    for source in sorted((SOURCES / name).iterdir()):
        target = folder / source.name
        if source.name == "control":
            target.write_text(source.read_text().format(**words))
        else:
            shutil.copy(source, target)
            target.chmod(0o755)
    (folder / "md5sums").write_text("".join(sums))
    folder.chmod(0o755)


def packed(content: bytes, target: Path) -> None:
    with target.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, 0) as out:
        out.write(content)
