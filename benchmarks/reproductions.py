"""Puts what `fewbytes reproduce --all` found into the documents.

    python benchmarks/reproductions.py [runs/reproduce/small.md]

The claims' table goes into docs/reproductions.md, between its marks; the whole document becomes
docs/reproductions-small.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
MARKS = "<!-- claims -->", "<!-- end of claims -->"


def main() -> None:
    text = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/reproduce/small.md").read_text()
    claims = text.split("\n\n", 1)[1].split("\n\n## ", 1)[0]  # what stands below the title, up to the first section
    page = DOCS / "reproductions.md"
    before, _, rest = page.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    page.write_text(f"{before}{MARKS[0]}\n{claims}\n{MARKS[1]}{after}")
    (DOCS / "reproductions-small.md").write_text(text)


if __name__ == "__main__":
    main()
