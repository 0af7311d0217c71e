#!/usr/bin/env python3
"""Checks the text of every file that git tracks against ceilings that may only fall. `make verify` runs it.

  scripts/check-text.py            check; a failure prints each new place, and what to write there
  scripts/check-text.py --all      print every place, also those under a ceiling
  scripts/check-text.py --report   print the lines and words of each folder, with their budgets
  scripts/check-text.py --lower    lower the ceilings in scripts/ceilings.json to what the tree has; raise none
  scripts/check-text.py --moved    after code moved between folders: move their budgets too; those of "all" stay

To lower a ceiling: improve the text, run --lower, commit both. A budget is a multiple of 100, so that a small fix fits.

Checked:
  forbidden words   those of scripts/text/words.txt (pattern -> usual English; not read itself) in documents, comments
                    and string literals
  long lines        comments and strings in lines over 122 columns: Rust, Python, shell, CUDA
  long paragraphs   paragraphs and list items over 90 words in Markdown, outside tables and code
  dead links        relative links and anchors in Markdown, and pages that docs/SUMMARY.md and scripts/book.py do not list
  long functions    functions over 70 lines in Python and shell; clippy checks Rust
  budgets           for each crate or package, else each top folder: lines of product and of tests, words of Markdown;
                    scripts/text/budget.py says what counts as what
"""
import ast
import json
import os
import re
import subprocess
import sys

sys.dont_write_bytecode = True  # `make verify` changes nothing.
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "text"))
import budget
import markdown

CEILINGS = "scripts/ceilings.json"
SUMMARY = "docs/SUMMARY.md"
PLACES = (
    "dead links", "forbidden words", "forbidden words in Markdown", "long functions", "long lines", "long paragraphs"
)
PROSE = (".rs", ".py", ".md", ".proto", ".sh", ".toml", ".yml", ".yaml", ".js", ".html")


def prose(path, line):
    """What people read of a line: all of a document's, the comments and string literals of code."""
    if path.endswith(".md"):
        return line
    if path.endswith((".rs", ".proto", ".js", ".cu")):
        parts = re.findall(r'//.*|"(?:[^"\\]|\\.)*"', line)
        return " ".join(parts) or (line if line.strip().startswith(("/*", "*")) else "")
    parts = re.findall(r'#.*|"(?:[^"\\]|\\.)*"|\'[^\']{12,}\'', line)
    docstring = path.endswith(".py") and line[:1] and line[0] in " \"" and not re.search(r"[=()\[\]{}]", line)
    return " ".join(parts) or (line if docstring else "")


def forbidden(path, lines, rules):
    """rules: pairs of a compiled pattern and the usual English."""
    for number, line in enumerate(lines, 1):
        text = prose(path, line)
        for rule, usual in rules if text else ():
            if found := rule.search(text):
                yield number, f"`{found[0]}`; usual English: {usual}"


def long_lines(path, lines):
    for number, line in enumerate(lines, 1):
        if len(line) > 122 and prose(path, line):
            yield number, f"{len(line)} columns: break the comment or string, 122 is the most"


def long_functions(path, lines):
    if path.endswith(".py"):
        nodes = ast.walk(ast.parse("\n".join(lines)))
        functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        spans = [(node.name, node.lineno, node.end_lineno) for node in functions]
    else:
        starts = [(re.match(r"([\w-]+) ?\(\) *\{$", line), number) for number, line in enumerate(lines, 1)]
        spans = [(found[1], start, lines.index("}", start) + 1) for found, start in starts if found]
    for name, start, end in spans:
        if end - start >= 70:
            yield start, f"{name} has {end - start + 1} lines: split it, 70 is the most"


def long_paragraphs(lines):
    for number, text in markdown.paragraphs(lines):
        if (words := len(text.split())) > 90:
            yield number, f"{words} words: split the paragraph or make it a list, 90 is the most"


def places(files, rules):
    """Every place that a ceiling counts: (ceiling, path, line number, what is wrong)."""
    pages = {path: markdown.anchors(lines) for path, lines in files.items() if path.endswith(".md")}
    names = {".", *files}.union(*(budget.folders(path) for path in files))
    checks = {name: [] for name in PLACES}
    for path, lines in files.items():
        page, code = path in pages, path.endswith((".rs", ".py", ".sh", ".cu"))
        script = path.endswith((".py", ".sh"))
        read = path.endswith(PROSE) or path == "Makefile"
        words = list(forbidden(path, lines, rules)) if read else []
        found = {
            "forbidden words": words,
            "forbidden words in Markdown": words if page else (),
            "long lines": long_lines(path, lines) if code else (),
            "long functions": long_functions(path, lines) if script else (),
            "long paragraphs": long_paragraphs(lines) if page else (),
            "dead links": markdown.dead_links(path, lines, pages, names) if page else (),
        }
        for name in PLACES:
            checks[name] += [(path, number, what) for number, what in found[name]]
    # scripts/book.py lists the decisions.
    listed = [path for path in pages if not re.match(r"docs/decisions/\d", path)]
    for path in markdown.unlisted(listed, SUMMARY, files.get(SUMMARY, [])):
        checks["dead links"].append((path, 1, f"{SUMMARY} does not list this page: add it"))
    return checks


def over(ceilings, counts):
    """What is over its ceiling. What has no ceiling must not be there."""
    return [name for name, count in sorted(counts.items()) if count > ceilings.get(name, 0)]


def lowered(ceilings, counts):
    """The ceilings that these counts allow: the same or lower ones, never a higher or a new one."""
    fallen = {}
    for name, ceiling in ceilings.items():
        count = counts.get(name, 0)
        fallen[name] = min(ceiling, count if name in PLACES else budget.room(count))
    return {name: ceiling for name, ceiling in fallen.items() if ceiling or name in PLACES}


def moved(ceilings, counts):
    """The ceilings after code moved: each folder's budgets follow its counts, if the budgets of "all" hold."""
    if any(name.endswith(" in all") for name in over(ceilings, counts)):
        return ceilings
    kept = {name: ceiling for name, ceiling in ceilings.items() if name in PLACES or name.endswith(" in all")}
    return {name: budget.room(count) for name, count in counts.items() if name not in PLACES} | kept


def git(*arguments):
    return subprocess.run(["git", *arguments], capture_output=True, text=True, errors="replace", check=True).stdout


def changed_lines():
    """The lines (path, number) that are new since the last change of the ceilings: what rose over one is there."""
    path, new = "", set()
    since = git("log", "-1", "--format=%H", "--", CEILINGS).strip() or "HEAD"
    for line in git("diff", "--unified=0", since).splitlines():
        if line.startswith("+++ "):
            path = line[6:]
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            new.update((path, int(hunk[1]) + n) for n in range(int(hunk[2] or 1)))
    return new


def read():
    """The lines of every text file that git tracks."""
    files = {}
    for path in git("ls-files", "-z").split("\0"):
        if os.path.isfile(path):
            with open(path, errors="replace") as file:
                files[path] = file.read().splitlines()
    return files


def explain(name, count, ceiling, found):
    """Prints the places of one ceiling, the new ones alone if there are any, and what to do."""
    new = changed_lines()
    for path, number, what in [place for place in found if place[:2] in new] or found[:50]:
        print(f"{path}:{number}: {what}")
    advice = "Rewrite the places above (--all lists every one)"
    if name not in PLACES:
        advice = "Remove what is not needed; if code moved here, run scripts/check-text.py --moved"
    print(f"text: {count:,} {name}, over the ceiling of {ceiling:,}. {advice}. No change raises a ceiling.")


def main(arguments):
    with open("scripts/text/words.txt") as file:
        pairs = [line.rstrip("\n").split(" -> ", 1) for line in file]
    files = read()
    found = places(files, [(re.compile(pattern, re.I), usual) for pattern, usual in pairs])
    counts = {name: len(found[name]) for name in PLACES} | budget.sizes(files)
    with open(CEILINGS) as file:
        ceilings = json.load(file)
    if change := {"--lower": lowered, "--moved": moved}.get(" ".join(arguments)):
        ceilings = change(ceilings, counts)
        with open(CEILINGS, "w") as file:
            file.write(json.dumps(ceilings, indent=1, sort_keys=True) + "\n")
    elif arguments == ["--report"]:
        print(budget.table(counts, ceilings))
    elif arguments == ["--all"]:
        every = sorted({place for name in PLACES for place in found[name]})
        print("\n".join(f"{path}:{number}: {what}" for path, number, what in every))
    elif arguments:
        sys.exit(__doc__)
    print("text: " + ", ".join(f"{counts[name]:,} {name}" for name in PLACES))
    failed = over(ceilings, counts)
    for name in failed:
        explain(name, counts[name], ceilings.get(name, 0), found.get(name, []))
    return 1 if failed else 0


if __name__ == "__main__":
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    sys.exit(main(sys.argv[1:]))
