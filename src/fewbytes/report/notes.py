"""Notes of a run's method for its reader (`net.note`), on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from fewbytes.core.promise import Privacy
from fewbytes.report.folder import RunFolder

OUTSIDE = {
    "clients": "the models that the server sends and keeps. Not covered, and exact: clients' losses and scores, "
    "their own models and states, counts of samples and labels, bytes",
    "samples": "training samples, in what clients send. Not covered: test samples, whose scores are exact, counts of "
    "samples and labels, and clients' own models and states where they are stored here",
}
"""What differential privacy covers, by unit, and the other contents of a run folder."""


def noted(runs: Sequence[RunFolder]) -> list[str]:
    """Why runs failed, the limits of a privacy promise, and a line per note of a run: its number of rounds, and its
    last amount."""
    lines = [f"{run.label} failed: {run.failure}" for run in runs if run.failure]
    for run in runs:
        found: dict[str, list[str]] = {}
        for row in run.rounds:
            for what, how_much in row.get("notes", {}).items():
                found.setdefault(what, []).append(how_much)
        rounds = sum(row["phase"] == "round" for row in run.rounds)
        name = f"{run.label}, " if len(runs) > 1 else ""
        if terms := run.fact("dp"):
            lines.append(f"{name}dp ({terms}) covers {OUTSIDE[Privacy.read(terms).of]}")
        lines += [
            f"{name}in {len(amounts)} of {rounds} rounds {what} (the last time {amounts[-1]})"
            for what, amounts in found.items()
        ]
    return lines
