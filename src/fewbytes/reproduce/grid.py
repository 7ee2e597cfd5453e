"""A paper's table as a grid: what each cell runs, what it reads of the run, what the paper prints there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fewbytes.report.folder import Direction, RunFolder

Scale = Literal["small", "paper"]
Figure = Callable[[RunFolder], float | None]
"""What a cell shows of a run, in the table's unit; None where the run has not come so far."""


@dataclass(frozen=True)
class Printed:
    """What the paper prints: a mean and, where it tells one, a standard deviation."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class Cell:
    """One run for each seed. Cells with equal settings share their runs, also among tables."""

    row: str  # neither has a comma: they are listed with commas
    column: str
    settings: Mapping[str, Any]  # of an Experiment: all it needs, with a model, but for its seed
    figure: Figure
    printed: Printed | None = None
    kind: str | None = None  # of the accuracy whose curve the report draws; None: none

    @property
    def run(self) -> str:
        """The name of its runs: the method, the data set, and a digest of all settings."""
        text = json.dumps(dict(self.settings), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"{self.settings['method']}-{self.settings['dataset']}-{digest}"


@dataclass(frozen=True)
class Table:
    """Cells, row by row, and what to say of them."""

    title: str
    unit: str  # of its figures, like "accuracy, %"
    cells: Sequence[Cell]
    notes: Sequence[str] = ()
    seeds: Sequence[int] = (1, 2, 3)

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(cell.column for cell in self.cells))


def printed(text: str) -> list[Printed | None]:
    """Figures as a paper prints them, "95.65±1.19 88.52 -", a dash where there is none."""
    pairs = [word.partition("±") for word in text.split()]
    return [None if mean == "-" else Printed(float(mean), float(sd) if sd else None) for mean, _, sd in pairs]


def best(kind: str) -> Figure:
    """The best accuracy of one kind over the rounds, in per cent: what most papers report."""
    return lambda run: _percent(run.score(kind).best)


def final(kind: str) -> Figure:
    """The accuracy of one kind after the last round, in per cent."""
    return lambda run: _percent(run.score(kind).final)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def traffic(
    direction: Direction,
    first: int = 1,
    last: int | None = None,
    *,
    count: Literal["nominal", "value", "sent"] = "nominal",
    clients: Literal["each", "all"] = "each",
    unit: float | None = None,
) -> Figure:
    """What a client moved on average in each of the rounds first..last, or all clients together.

    `count`: as the papers do, 4 bytes a value and 1 bit a mask entry, or the values alone, in MB of 2^20 bytes; or as
    sent, in MB of 10^6 (`unit`: in so many bytes instead). A download after the last round counts as one round's more.
    """
    key = f"{direction}_bytes" if count == "sent" else f"{direction}_{count}_bytes"
    phases = ("round", "finish") if direction == "downlink" else ("round",)
    size = unit or (1e6 if count == "sent" else 2**20)

    def figure(run: RunFolder) -> float | None:
        rows = [row for row in run.rounds if row["phase"] in phases and first <= row["round"] <= (last or row["round"])]
        shares = sum(row["cohort"] for row in rows) if clients == "each" else len(rows)
        return sum(row[key] for row in rows) / shares / size if shares else None

    return figure
