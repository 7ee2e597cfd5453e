"""One updating line about a run, in a terminal or a notebook, for runs without a watcher."""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fewbytes.base.errors import visible
from fewbytes.base.units import moved, written
from fewbytes.core.metric_names import traits
from fewbytes.running.watcher import Watcher

NOTEBOOK_WIDTH = 100  # characters


class Line(Watcher):
    """Rewrites one line on standard error: round, score of the method's own kind, megabytes of both directions, time
    left. It works in terminals and notebooks alike. Notes are warnings, as without a watcher.

    `headline`: the kind of score that comes first. `width`: maximum number of characters.
    """

    def __init__(self, name: str, headline: str, width: int) -> None:
        self._name, self._headline, self._width = name, headline, width
        self._rounds, self._up, self._down, self._printed = 0, 0, 0, 0
        self._seconds: list[float] = []  # per round
        self._scores = ""

    def started(self, folder: Path, rounds: int, done: int) -> None:
        """Print the line for the first time."""
        self._rounds = rounds
        self._show([f"round {done}/{rounds}"])

    def moved(self, uplink_bytes: int, downlink_bytes: int) -> None:
        """Keep the bytes for the next line."""
        self._up, self._down = uplink_bytes, downlink_bytes

    def scored(self, row: dict[str, Any]) -> None:
        """Rewrite the line."""
        done = min(row["round"], self._rounds)
        self._seconds.append(row["seconds"])
        for metric, kinds in list(row["scores"].items())[:1]:
            kind = self._headline if self._headline in kinds else next(iter(kinds))
            self._scores = score_words({metric: {kind: kinds[kind]}})
        left = (self._rounds - done) * statistics.median(self._seconds)
        parts = [f"round {done}/{self._rounds}", self._scores, moved(self._up, self._down)]
        self._show([*parts, f"{duration(left)} left" if left >= 1 else ""])

    def stopped(self, t: int, why: str) -> None:
        """Shorten the run."""
        self._rounds = t

    def ended(self, result: dict[str, Any]) -> None:
        """End the line."""
        if result["status"] != "done":
            self._show([result["status"], f"after {self._scores}" if self._scores else ""])
        sys.stderr.write("\n")
        sys.stderr.flush()

    def _show(self, parts: Sequence[str]) -> None:
        """Print the first parts that fit."""
        kept = [part for part in parts if part]
        while len(text := visible(f"{self._name}: {'  '.join(kept)}")) > self._width and len(kept) > 1:
            kept.pop()
        sys.stderr.write(f"\r{text[: self._width].ljust(self._printed)}")
        sys.stderr.flush()
        self._printed = len(text[: self._width])


def line_for(name: str, headline: str) -> Watcher:
    """A `Line` if standard error is a terminal or a notebook's, else a watcher that prints nothing."""
    if in_notebook():
        return Line(name, headline, NOTEBOOK_WIDTH)
    if sys.stderr is not None and sys.stderr.isatty():
        return Line(name, headline, shutil.get_terminal_size().columns - 1)
    return Watcher()


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this process; nothing is imported."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def duration(seconds: float) -> str:
    """Seconds as minutes and seconds, `2:05`, and hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def score_words(scores: dict[str, dict[str, float]], named: bool | None = None) -> str:
    """Scores by metric and kind in a line; accuracy as the only metric needs no name, unless `named`."""
    lines = []
    for metric, kinds in scores.items():
        of = traits(metric)
        line = "  ".join(f"{kind} {written(value, of.share and of.percent)}" for kind, value in kinds.items())
        plain = list(scores) == ["accuracy"] if named is None else not named
        lines.append(line if plain else f"{metric}: {line}")
    return "  ".join(lines)
