#!/usr/bin/env python3
"""Runs the demo on a terminal of its own and draws what stays on the screen, from its second run on:
docs/images/demo.svg, for README.md.

    make demo; scripts/demo-picture.py target/debug/elastic-demo
"""

import html
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

# The first run is only there to be compared with.
FROM = "2 of 2"
OUT = Path(__file__).parent.parent / "docs/images/demo.svg"
COLUMNS, CHARACTER, LINE, EDGE = 100, 7.2, 17, 14
# The demo's styles (demo/src/screen.rs), by their codes.
CLASSES = {"1": "bold", "2": "dim", "32": "good", "31": "bad"}
STYLE = """
  rect { fill: #ffffff; stroke: #d0d7de }
  text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328; white-space: pre }
  .bold { font-weight: bold } .dim { fill: #59636e } .good { fill: #1a7f37 } .bad { fill: #d1242f }
  @media (prefers-color-scheme: dark) {
    rect { fill: #0d1117; stroke: #3d444d } text { fill: #f0f6fc }
    .dim { fill: #9198a1 } .good { fill: #3fb950 } .bad { fill: #f85149 }
  }
"""


def run(command):
    """What the command writes to a terminal; ends with its exit code if it fails."""
    ours, its = pty.openpty()
    # Wide enough for each line.
    subprocess.run(["stty", "rows", "50", "cols", str(COLUMNS)], stdin=its, check=True)
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with subprocess.Popen(command, stdin=its, stdout=its, env=environment) as program:
        os.close(its)
        written = b""
        while True:
            try:
                some = os.read(ours, 65536)
            except OSError:  # no one has the other end open
                break
            if not some:
                break
            written += some
    if program.returncode:
        sys.exit(f"{command[0]} ended with {program.returncode}")
    return written.decode()


def screen(written):
    """The lines that are there at the end, as pieces of style and text. The demo writes whole lines, goes up by lines,
    and clears from the cursor on."""
    lines, row, style = [[]], 0, None
    for code, text in re.findall(r"\x1b\[([?\d]*[A-Za-z])|([^\x1b]+)", written):
        if code.endswith("F"):
            row = max(0, row - int(code[:-1] or 1))
            lines[row] = []
        elif code == "J":
            del lines[row + 1 :]
        elif code.endswith("m"):
            style = CLASSES.get(code[:-1])
        for number, part in enumerate(text.replace("\r", "").split("\n")):
            if number:
                row += 1
                lines += [[] for _ in range(row + 1 - len(lines))]
                lines[row] = []
            if part:
                lines[row].append((style, part))
    while lines and not lines[-1]:
        lines.pop()
    begin = next(number for number, line in enumerate(lines) if line and line[0][1].startswith(FROM))
    return lines[begin:]


def picture(lines):
    width = max(sum(len(text) for _, text in line) for line in lines) * CHARACTER + 2 * EDGE
    height = len(lines) * LINE + 2 * EDGE
    rows = []
    for number, line in enumerate(lines):
        pieces = "".join(
            f'<tspan class="{style}">{html.escape(text)}</tspan>' if style else html.escape(text)
            for style, text in line
        )
        if pieces:
            rows.append(f'<text x="{EDGE}" y="{EDGE + number * LINE + 12}">{pieces}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" xml:space="preserve">\n<style>{STYLE}</style>\n'
        f'<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="6"/>\n' + "\n".join(rows) + "\n</svg>\n"
    )


if len(sys.argv) < 2:
    sys.exit(__doc__)
OUT.write_text(picture(screen(run(sys.argv[1:]))))
print(OUT)
