"""Counts for check-text.py how large each crate or package is, and each top folder without one.

Code is Rust, Python, CUDA, C, shell, JavaScript and proto files and every script with a `#!` line; lines that are blank
do not count, comments do. Documents are Markdown files, by words.

Tests are files below tests/, benches/, fuzz/, simulation/, mutants/ and fake-nccl/; files named tests.rs, *_test.rs and
test_*.py; and in Rust the items and modules under `#[cfg(test)]`. All else is product: demo, examples, packaging and
scripts too.
"""
import os, re
from collections import Counter

CODE = (".rs", ".py", ".cu", ".c", ".cpp", ".h", ".sh", ".js", ".proto")
TEST_FOLDERS = {"tests", "benches", "fuzz", "simulation", "mutants", "fake-nccl"}
TEST_NAME = re.compile(r"tests\.rs|\w+_test\.rs|test_\w+\.py")
TEST_MODULE = re.compile(r"#\[cfg\(test\)\]\s+(?:pub(?:\([a-z]+\))? )?mod (\w+);")
KINDS = ("product lines", "test lines", "document words")


def folders(path):
    """The folders that a file is in, the innermost first."""
    return ["/".join(path.split("/")[:n]) for n in range(path.count("/"), 0, -1)]


def lines_under_cfg_test(lines):
    """How many lines of a Rust file; rustfmt closes an item at the indentation at which it began."""
    count, indent = 0, None
    for line in lines:
        if indent is None and (found := re.fullmatch(r"(\s*)#\[cfg\(test\)\]", line)):
            indent = found[1]
        if indent is not None and line.strip():
            count += 1
            if re.match(indent + r'([^\s#"].*)?[;}]$', line):
                indent = None
    return count


def test_modules(path, lines):
    """The paths, without .rs, of the modules that a Rust file declares for tests alone."""
    own = os.path.dirname(path) if path.endswith(("/mod.rs", "/lib.rs", "/main.rs")) else path.removesuffix(".rs")
    return {f"{own}/{name}" for name in TEST_MODULE.findall("\n".join(lines))}


def is_test(path, modules):
    """modules: what test_modules gives for all files."""
    names = {os.path.basename(folder) for folder in folders(path)}
    above = {path.removesuffix(".rs"), *folders(path)}
    return bool(TEST_FOLDERS & names or TEST_NAME.fullmatch(os.path.basename(path)) or modules & above)


def split(path, lines, modules):
    """A file's lines or words, by kind."""
    if path.endswith(".md"):
        return {"document words": sum(len(line.split()) for line in lines)}
    if not path.endswith(CODE) and not (lines and lines[0].startswith("#!")):
        return {}
    tests = total = sum(bool(line.strip()) for line in lines)
    if not is_test(path, modules) and "#![cfg(test)]" not in lines:
        tests = lines_under_cfg_test(lines) if path.endswith(".rs") else 0
    return {"test lines": tests, "product lines": total - tests}


def sizes(files):
    """The lines and words of all files (path: lines), as "product lines in agent": 9000; and "... in all"."""
    counts = Counter()
    packages = {os.path.dirname(path) for path in files if path.endswith(("/Cargo.toml", "/pyproject.toml"))}
    modules = {name for path, lines in files.items() if path.endswith(".rs") for name in test_modules(path, lines)}
    for path, lines in files.items():
        above = folders(path)
        folder = next((name for name in above if name in packages), above[-1] if above else "the root")
        for kind, count in split(path, lines, modules).items():
            counts.update({f"{kind} in {folder}": count, f"{kind} in all": count})
    return {name: count for name, count in counts.items() if count}


def room(count):
    """The budget for a count: a hundred is the unit, so that a small fix fits."""
    return -(-count // 100) * 100


def table(counts, ceilings):
    """Folder by folder, each count with its budget."""
    names = sorted({name.partition(" in ")[2] for name in counts if name.startswith(KINDS)} - {"all"})
    rows = [("", *KINDS)]
    for name in [*names, "all"]:
        pairs = [(counts.get(f"{kind} in {name}", 0), ceilings.get(f"{kind} in {name}", 0)) for kind in KINDS]
        rows.append((name, *(f"{count:,} / {budget:,}" if count or budget else "" for count, budget in pairs)))
    return "\n".join(f"{row[0]:30}" + "".join(f"{cell:>22}" for cell in row[1:]) for row in rows)
