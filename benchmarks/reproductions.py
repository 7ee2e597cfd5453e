"""Puts what `fewbytes reproduce --all` found into the documents.

    python benchmarks/reproductions.py [runs/reproduce/small.md]

The whole document becomes docs/reproductions-small.md, its claims' table goes into docs/reproductions.md, between the
marks there. A table of which more was run before keeps what it has there, and the document says so.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
MARKS = "<!-- claims -->", "<!-- end of claims -->"
COMMAND = re.compile(r"`fewbytes reproduce ([\w/-]+)`")


def main() -> None:
    path, page = DOCS / "reproductions-small.md", DOCS / "reproductions.md"
    text = merged(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/reproduce/small.md").read_text(), path.read_text())
    claims = text.split("\n\n", 1)[1].split("\n\n## ", 1)[0]  # what stands below the title, up to the first section
    before, _, rest = page.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    page.write_text(f"{before}{MARKS[0]}\n{claims}\n{MARKS[1]}{after}")
    path.write_text(text)


def merged(new: str, old: str) -> str:
    """The new document, with the sections and claims of tables that have more runs in the old one."""
    mine, theirs = sections(new), sections(old)
    kept = [name for name in mine if name in theirs and runs(theirs[name]) > runs(mine[name])]
    for name in kept:
        new = new.replace(mine[name], theirs[name])
    claims = {name: [line for line in old.split("\n") if claims_of(line) == name] for name in kept}
    lines = list[str]()
    for line in new.split("\n"):
        name = claims_of(line)
        lines += [claims[name].pop(0)] if claims.get(name) else [line]
    if kept:
        said = next(i for i, line in enumerate(lines) if line.startswith("Written by "))
        lines[said] += f" Besides these, as run before: {', '.join(kept)}."
    return "\n".join(lines)


def sections(text: str) -> dict[str, str]:
    """What stands of each table, by its name."""
    parts = text.rstrip("\n").split("\n\n## ")[1:]
    named = ((COMMAND.search(part), part) for part in parts)
    return {match[1]: part for match, part in named if match}


def runs(section: str) -> int:
    """How many runs a table's section is of."""
    return int(re.search(r"`: (\d+) runs, ", section)[1])


def claims_of(line: str) -> str:
    """The table of which a line is a claim's; empty if it is none."""
    match = COMMAND.search(line)
    return match[1] if match and line.startswith("| ") else ""


if __name__ == "__main__":
    main()
