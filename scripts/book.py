#!/usr/bin/env python3
"""Builds the book: every Markdown page of this tree as a web page with a search, in FOLDER/book.

  scripts/book.py MDBOOK FOLDER

mdBook wants its pages below one folder with SUMMARY.md at its top, and links lead from docs/ to other folders. So this
copies the pages, and the files that they link to, into FOLDER/book-pages, each at its own path.
"""
import glob
import os
import re
import shutil
import subprocess
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "text"))
import markdown

SUMMARY = "docs/SUMMARY.md"
DECISIONS = "docs/decisions"


def wanted():
    """The pages, and the files that they link to."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], capture_output=True, text=True, check=True).stdout
    pages = {path for path in listed.split("\0") if path}
    files = {"book.toml"}
    for path in pages:
        with open(path) as page:
            links = markdown.links(page.read().splitlines())
            files |= {markdown.target(path, link)[0] for _, link in links}
    return pages | {path for path in files if path and os.path.isfile(path)}


def decisions():
    """The entries of all decisions, in the order of their files' names."""
    for path in sorted(glob.glob(f"{DECISIONS}/0*.md")):
        with open(path) as page:
            yield f"  - [{page.readline().lstrip('# ').strip()}]({path})\n"


def main(mdbook, folder):
    pages = os.path.join(folder, "book-pages")
    shutil.rmtree(pages, ignore_errors=True)
    for path in wanted():
        os.makedirs(os.path.dirname(os.path.join(pages, path)), exist_ok=True)
        shutil.copy(path, os.path.join(pages, path))
    with open(SUMMARY) as page:
        contents = re.sub(r"\]\(([^)]+)\)", lambda link: f"]({markdown.target(SUMMARY, link[1])[0]})", page.read())
    listed = re.search(rf".*\({DECISIONS}/README\.md\)\n", contents)
    contents = contents[: listed.end()] + "".join(decisions()) + contents[listed.end() :]
    with open(os.path.join(pages, "SUMMARY.md"), "w") as page:
        page.write(contents)
    book = os.path.join(os.path.abspath(folder), "book")
    subprocess.run([mdbook, "build", "--dest-dir", book, pages], check=True)
    print(f"the book is in {book}: open {book}/index.html")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    main(*sys.argv[1:])
