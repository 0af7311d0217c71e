"""Reads Markdown pages for check-text.py: paragraphs, anchors, and links that lead nowhere."""
import os, re

LINK = re.compile(r'\]\(<?([^)\s>]+)|^\s*\[[^\]]+\]:\s+(\S+)|(?:href|src)="([^"]+)"')


def unfenced(lines):
    """The numbered lines outside code blocks; an empty one where a block begins or ends."""
    fence = None
    for number, line in enumerate(lines, 1):
        mark = re.match(r"[\s>]*(```+|~~~+)", line)
        if mark and (fence is None or mark[1].startswith(fence)):
            fence = mark[1] if fence is None else None
            yield number, ""
        elif fence is None:
            yield number, line


def paragraphs(lines):
    """The paragraphs and list items, each with the number of its first line. No tables, headings, comments."""
    block, start = [], 0
    for number, line in [*unfenced(lines), (len(lines) + 1, "")]:
        text = line.strip().lstrip("> ")
        apart = not text or text[0] in "#|" or text.startswith("<!--")
        if block and (apart or re.match(r"([-*+]|\d+[.)])\s", text)):
            yield start, " ".join(block)
            block = []
        if not apart:
            start = start if block else number
            block.append(text)


def anchors(lines):
    """The anchors that GitHub gives a page: headings in lower case, `-` for a space, no punctuation."""
    found = {}
    for _, line in unfenced(lines):
        found.update((name, 0) for name in re.findall(r'<a (?:id|name)="([^"]+)"', line))
        if heading := re.match(r"#{1,6}\s+(.*?)\s*$", line):
            text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            first = name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            while name in found:
                found[first] += 1
                name = f"{first}-{found[first]}"
            found[name] = 0
    return set(found)


def links(lines):
    """The links outside code: (line number, target)."""
    for number, line in unfenced(lines):
        for found in LINK.finditer(re.sub(r"`[^`]*`", "``", line)):
            yield number, found[1] or found[2] or found[3]


def target(path, link):
    """The file and the anchor that a link in a page leads to; no file for a link to another site."""
    if re.match(r"[a-z+.-]+:", link):
        return None, ""
    name, _, anchor = link.partition("#")
    return os.path.normpath(os.path.join(os.path.dirname(path), name)) if name else path, anchor


def dead_links(path, lines, pages, names):
    """pages: the anchors of each page. names: every file and folder."""
    for number, link in links(lines):
        name, anchor = target(path, link)
        if name and name not in names:
            yield number, f"dead link {link}: git tracks no {name}"
        elif anchor and name in pages and anchor not in pages[name]:
            yield number, f"dead link {link}: {name} has no such heading"


def unlisted(pages, summary, lines):
    """The pages that a table of contents leaves out."""
    listed = {target(summary, link)[0] for _, link in links(lines)}
    return sorted(set(pages) - listed - {summary})
