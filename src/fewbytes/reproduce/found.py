"""The current runs of a cell, and the resulting figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from fewbytes.base.errors import UserError
from fewbytes.experiments.run_folders import finished
from fewbytes.report.folder import RunFolder
from fewbytes.reproduce.grid import Cell, Printed
from fewbytes.reproduce.running import folder_of, read_cell


@dataclass(frozen=True)
class CellRuns:
    """A cell and its started runs by seed; when complete, there is one per seed of the table (`seeds`)."""

    cell: Cell
    runs: dict[int, RunFolder]
    seeds: int = 1

    @property
    def values(self) -> dict[int, float]:
        """The cell's figure by seed, for runs that have it."""
        figures = {seed: self.cell.figure(run) for seed, run in self.runs.items()}
        return {seed: figure for seed, figure in figures.items() if figure is not None}

    @property
    def counted(self) -> dict[int, float]:
        """The counted figures: those of finished runs or, if there are none, of all started ones."""
        done = {seed: value for seed, value in self.values.items() if seed not in self.unfinished}
        return done or self.values

    @property
    def ours(self) -> Printed | None:
        """The mean and, for several seeds, the standard deviation (n - 1)."""
        values = list(self.counted.values())
        return Printed(fmean(values), stdev(values) if len(values) > 1 else None) if values else None

    @property
    def unfinished(self) -> dict[int, int]:
        """The number of finished rounds of unfinished runs, by seed."""
        return {
            seed: sum(row["phase"] == "round" for row in run.rounds)
            for seed, run in self.runs.items()
            if not finished(run.path)
        }

    @property
    def done(self) -> bool:
        """Whether the counted runs are finished and complete."""
        return not self.counted.keys() & self.unfinished.keys() and len(self.counted) >= self.seeds

    @property
    def theirs(self) -> str:
        """The paper's figure as text, with the difference of ours; empty if it has none."""
        if self.cell.printed is None:
            return ""
        away = "" if self.ours is None else f", {self.ours.mean - self.cell.printed.mean:+.2f}"
        return figure(self.cell.printed) + away


def find(cells: Sequence[Cell], seeds: Sequence[int], wanted: int, out: Path) -> tuple[list[CellRuns], list[str]]:
    """The current runs of some cells, each with `wanted` seeds when complete, and the errors of damaged runs."""
    read: dict[Path, RunFolder] = {}
    damaged = []
    for folder in sorted({folder_of(cell, seed, out) for cell in cells for seed in seeds}):
        if (folder / "rounds.jsonl").exists() or (folder / "result.json").exists():
            try:
                read[folder] = read_cell(folder)
            except UserError as error:
                damaged.append(str(error))
    return [
        CellRuns(cell, {seed: read[folder] for seed in seeds if (folder := folder_of(cell, seed, out)) in read}, wanted)
        for cell in cells
    ], damaged


def figure(value: Printed) -> str:
    """A mean and its standard deviation as text."""
    return f"{value.mean:.2f}" + (f" ± {value.deviation:.2f}" if value.deviation is not None else "")
