"""The tarball: a tree to be unpacked into a prefix."""

import gzip
import shutil
import tarfile
from pathlib import Path

from project import DIST, ROOT, Project

README = """\
elastic {version} for Linux on {machine}, glibc 2.28 or newer.

    tar -xzf {name}.tar.gz --strip-components=1 -C /usr/local

puts the programs into /usr/local/bin, with manual pages, completions and systemd's units. Any other directory does as
well: the programs need nothing beside them. The units name /usr/local/bin.
"""


def make(project: Project, tree: Path) -> Path:
    name = f"elastic-{project.version}-{project.machine}-linux"
    units = tree / "lib/systemd/system"
    units.mkdir(parents=True)
    for unit in sorted((ROOT / "deploy/systemd").glob("*.service")):
        shutil.copy(unit, units)
    readme = README.format(version=project.version, machine=project.machine, name=name)
    (tree / "share/doc/elastic/README").write_text(readme)
    file = DIST / f"{name}.tar.gz"

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        member.mtime = project.epoch
        member.mode = 0o755 if member.isdir() or "/bin/" in member.name else 0o644
        return member

    with file.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, project.epoch) as packed:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for path in sorted(tree.rglob("*")):
                archive.add(path, f"{name}/{path.relative_to(tree)}", recursive=False, filter=plain)
    return file
