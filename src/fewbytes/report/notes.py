"""What a run's method noted for the reader of its results (`net.note`), for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from fewbytes.report.folder import RunFolder


def noted(runs: Sequence[RunFolder]) -> list[str]:
    """A line for everything that was noted of a run: in how many of its rounds, and how much of it the last time."""
    lines = []
    for run in runs:
        found: dict[str, list[str]] = {}
        for row in run.rounds:
            for what, how_much in row.get("notes", {}).items():
                found.setdefault(what, []).append(how_much)
        rounds = sum(row["phase"] == "round" for row in run.rounds)
        name = f"{run.label}, " if len(runs) > 1 else ""
        lines += [
            f"{name}in {len(amounts)} of {rounds} rounds {what} (the last time {amounts[-1]})"
            for what, amounts in found.items()
        ]
    return lines
