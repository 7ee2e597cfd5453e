"""What a run's method noted for the reader of its results (`net.note`), for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fewbytes.report.folder import RunFolder


def captions(runs: Sequence[RunFolder]) -> list[str]:
    """A line of plain text for everything that was noted of a run: in how many rounds, and how much of it at last."""
    lines = []
    for run in runs:
        noted: dict[str, list[str]] = {}
        for row in run.rounds:
            for what, how_much in row.get("notes", {}).items():
                noted.setdefault(what, []).append(how_much)
        rounds = sum(row["phase"] == "round" for row in run.rounds)
        name = f"{run.label}, " if len(runs) > 1 else ""
        lines += [
            f"note: {name}in {len(found)} of {rounds} rounds {what} (the last time {found[-1]})"
            for what, found in noted.items()
        ]
    return lines


def section(runs: Sequence[RunFolder]) -> str:
    """The section of the page; nothing where nothing was noted."""
    lines = "\n".join(f"<p>{escape(line.removeprefix('note: '))}.</p>" for line in captions(runs))
    return f"<section>\n<h2>Notes</h2>\n{lines}\n</section>" if lines else ""
