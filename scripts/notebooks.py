"""Makes a notebook of each tutorial: docs/tutorials/*.md to docs/notebooks/*.ipynb.

python scripts/notebooks.py
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

DOCS = Path(__file__).parents[1] / "docs"
SITE = "https://fewbytes.readthedocs.io/en/latest/"
_BLOCK = re.compile(r"```(bash|python)\n(.*?)```\n", re.DOTALL)
_SELF = re.compile(r"This page \[as a notebook\]\([^)]*\)\.\s*")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)\.md(#[^)]*)?\)")


def notebook(page: Path) -> str:
    """A tutorial as a notebook: its Python as cells, its commands as cells of a shell, all else as text."""
    cells, text = [], _SELF.sub("", page.read_text("utf-8"))
    for number, part in enumerate(re.split(r"(```(?:bash|python)\n.*?```\n)", text, flags=re.DOTALL)):
        if block := _BLOCK.fullmatch(part):
            language, code = block.groups()
            if language == "bash":
                code = "".join(f"!{line}\n" for line in re.sub(r"\\\n\s*", "", code).splitlines())
            cell = new_code_cell(code.rstrip())
        elif part.strip():
            cell = new_markdown_cell(_LINK.sub(lambda link: _elsewhere(page, link), part.strip()))
        else:
            continue
        cell.id = f"cell-{number}"
        cells.append(cell)
    made = new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    return nbformat.writes(made) + "\n"


def _elsewhere(page: Path, link: re.Match[str]) -> str:
    """A link to another page of the site: a notebook is read anywhere."""
    target = (page.parent / link[1]).resolve().relative_to(DOCS)
    return f"]({SITE}{target.as_posix()}.html{link[2] or ''})"


def main() -> None:
    for page in sorted((DOCS / "tutorials").glob("*.md")):
        (DOCS / "notebooks" / f"{page.stem}.ipynb").write_text(notebook(page), "utf-8")


if __name__ == "__main__":
    main()
