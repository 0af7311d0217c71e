"""The licences of the libraries that are linked into the programs: who passes the programs on must pass these on."""

from pathlib import Path

from project import PROGRAMS, Failure, Project

# How libraries call the files.
NAMES = ("licen", "copying", "notice", "unlicense")


def write(project: Project, path: Path) -> None:
    packages = {one["id"]: one for one in project.metadata["packages"]}
    nodes = {one["id"]: one for one in project.metadata["resolve"]["nodes"]}
    ours = [one["id"] for one in packages.values() if {target["name"] for target in one["targets"]} & set(PROGRAMS)]
    linked: set[str] = set()
    to_see = ours
    while to_see:
        one = to_see.pop()
        if one in linked:
            continue
        linked.add(one)
        for dependency in nodes[one]["deps"]:
            # Neither what tests nor what build scripts use is part of a program.
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                to_see.append(dependency["pkg"])
    # Macros run in the compiler alone.
    def macro(package: dict) -> bool:
        return any("proc-macro" in target["kind"] for target in package["targets"])

    theirs = [packages[one] for one in linked if packages[one]["source"] and not macro(packages[one])]
    texts: dict[str, list[str]] = {}
    without = []
    for package in sorted(theirs, key=lambda one: (one["name"], one["version"])):
        name = f"{package['name']} {package['version']} ({package['license']})"
        folder = Path(package["manifest_path"]).parent
        files = sorted(file for file in folder.iterdir() if file.name.lower().startswith(NAMES) and file.is_file())
        for file in files:
            texts.setdefault(file.read_text(errors="replace").strip(), []).append(f"{name}, {file.name}")
        if not files:
            without.append(f"{name}, by {', '.join(package['authors']) or package['repository']}")
    if not texts:
        raise Failure("no licence of any library was found: are cargo's sources complete?")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as out:
        out.write("These libraries are part of the programs. Each text is preceded by those that it holds for.\n")
        for text, names in texts.items():
            out.write("\n" + "=" * 80 + "\n" + "\n".join(names) + "\n" + "-" * 80 + "\n\n" + text + "\n")
        out.write("\n" + "=" * 80 + "\nThese bring no text of their own; their authors name the licence alone:\n")
        out.writelines(f"{name}\n" for name in without)
