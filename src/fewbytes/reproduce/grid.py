"""A paper's table as a grid: each cell's run, the figure that it shows, and the paper's figure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from fewbytes.methods import short_name
from fewbytes.reproduce.figures import Figure

Scale = Literal["small", "paper"]


@dataclass(frozen=True)
class Printed:
    """A figure in the paper: a mean and, if given, a standard deviation."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class Cell:
    """One run for each seed. Cells with equal settings share runs, also across tables."""

    row: str
    column: str
    settings: Mapping[str, Any]  # complete settings of an Experiment, with a model, except the seed
    figure: Figure
    printed: Printed | None = None

    @property
    def run(self) -> str:
        """The name of its runs: method, dataset, and a digest of all settings."""
        text = json.dumps(dict(self.settings), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"{short_name(self.settings['method'])}-{self.settings['dataset']}-{digest}"


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A paper's claim on rows: in each matching column, every figure of the rows `above` is at least `times` every one
    of the rows `below`. `why`: the known reason if it is not confirmed."""

    text: str
    above: tuple[str, ...]
    below: tuple[str, ...]
    columns: tuple[str, ...] = ("*",)
    times: float = 1.0
    scale: Scale | None = None
    why: str = ""


@dataclass(frozen=True)
class Table:
    """Cells, row by row, with title, unit, notes and claims."""

    title: str
    unit: str  # of its figures, like "accuracy, %"
    cells: Sequence[Cell]
    notes: Sequence[str]
    seeds: Sequence[int]
    claims: Sequence[Claim] = ()

    @property
    def rows(self) -> list[str]:
        """The rows' names, in order."""
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> list[str]:
        """The columns' names, in order."""
        return list(dict.fromkeys(cell.column for cell in self.cells))


def printed(text: str) -> list[Printed | None]:
    """Figures in a paper's format, "95.65±1.19 88.52 -"; a dash means none. Raises ValueError."""
    pairs = [word.partition("±") for word in text.split()]
    return [None if mean == "-" else Printed(float(mean), float(sd) if sd else None) for mean, _, sd in pairs]
