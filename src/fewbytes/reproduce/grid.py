"""A paper's table as a grid: what each cell runs, what it shows of the run, what the paper prints there."""

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
    """What the paper prints: a mean and, where it gives one, a standard deviation."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class Cell:
    """One run for each seed. Cells with equal settings share their runs, also among tables."""

    row: str
    column: str
    settings: Mapping[str, Any]  # of an Experiment: all it needs, with a model, but for its seed
    figure: Figure
    printed: Printed | None = None

    @property
    def run(self) -> str:
        """The name of its runs: the method, the data set, and a digest of all settings."""
        text = json.dumps(dict(self.settings), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"{short_name(self.settings['method'])}-{self.settings['dataset']}-{digest}"


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a paper claims of rows: in each column that fits, every figure of the rows `above` is at least `times` each
    of those `below`. `why`: what is known of the reason where it is not seen."""

    text: str
    above: tuple[str, ...]
    below: tuple[str, ...]
    columns: tuple[str, ...] = ("*",)
    times: float = 1.0
    scale: Scale | None = None
    why: str = ""


@dataclass(frozen=True)
class Table:
    """Cells, row by row, and what to say of them."""

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
    """Figures as a paper prints them, "95.65±1.19 88.52 -", a dash where there is none. Raises ValueError."""
    pairs = [word.partition("±") for word in text.split()]
    return [None if mean == "-" else Printed(float(mean), float(sd) if sd else None) for mean, _, sd in pairs]
