"""Notes of a run's method for its reader (`net.note`), on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fewbytes.base.errors import listed
from fewbytes.core.promise import Privacy
from fewbytes.report.folder import RunFolder
from fewbytes.report.repeats import Repeated, by_text

NAMED = 3
"""Maximum number of methods or runs that a line names."""

OUTSIDE = {
    "clients": "the models that the server sends and keeps. Not covered, and exact: clients' losses and scores, "
    "their own models and states, counts of samples and labels, bytes",
    "samples": "training samples, in what clients send. Not covered: test samples, whose scores are exact, counts of "
    "samples and labels, and clients' own models and states where they are stored here",
}
"""What differential privacy covers, by unit, and the other contents of a run folder."""


def noted(runs: Sequence[RunFolder]) -> list[str]:
    """Why runs failed, the limits of a privacy promise, and a line per note of a run: its number of rounds, and its
    last amount. Runs with equal lines share one."""
    failures = by_text(runs, lambda run: [run.failure] if run.failure else [])
    lines = [f"{_named(about)} failed: {text}" for about, text in failures]
    return lines + [f"{_named(about)}: {text}" if len(runs) > 1 else text for about, text in by_text(runs, _notes)]


def _notes(run: RunFolder) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for row in run.rounds:
        for what, how_much in row.get("notes", {}).items():
            found.setdefault(what, []).append(how_much)
    rounds = sum(row["phase"] == "round" for row in run.rounds)
    if terms := run.fact("dp"):
        yield f"dp ({terms}) covers {OUTSIDE[Privacy.read(terms).of]}"
    for what, amounts in found.items():
        yield f"in {len(amounts)} of {rounds} rounds {what} (the last time {amounts[-1]})"


def _named(about: Sequence[Repeated]) -> str:
    return listed([each.label for each in about], NAMED)
