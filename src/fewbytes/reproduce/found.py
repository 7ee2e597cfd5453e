"""A cell's runs as they are now, and the figure that they come to."""

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
    """A cell and its runs, those that have begun, by seed; it is to have as many as its table has `seeds`."""

    cell: Cell
    runs: dict[int, RunFolder]
    seeds: int = 1

    @property
    def values(self) -> dict[int, float]:
        """The cell's figure of every run that has come so far."""
        figures = {seed: self.cell.figure(run) for seed, run in self.runs.items()}
        return {seed: figure for seed, figure in figures.items() if figure is not None}

    @property
    def counted(self) -> dict[int, float]:
        """The figures that count: those of runs that are done or, where none is, of all that have begun."""
        done = {seed: value for seed, value in self.values.items() if seed not in self.unfinished}
        return done or self.values

    @property
    def ours(self) -> Printed | None:
        """Mean and, of several seeds, standard deviation (n - 1)."""
        values = list(self.counted.values())
        return Printed(fmean(values), stdev(values) if len(values) > 1 else None) if values else None

    @property
    def unfinished(self) -> dict[int, int]:
        """The rounds that runs not yet done have behind them, by seed."""
        return {
            seed: sum(row["phase"] == "round" for row in run.rounds)
            for seed, run in self.runs.items()
            if not finished(run.path)
        }

    @property
    def done(self) -> bool:
        """Whether the runs that count are done, and as many as there are to be."""
        return not self.counted.keys() & self.unfinished.keys() and len(self.counted) >= self.seeds

    @property
    def theirs(self) -> str:
        """The paper's in words, and how far ours is from it; nothing where it has none."""
        if self.cell.printed is None:
            return ""
        away = "" if self.ours is None else f", {self.ours.mean - self.cell.printed.mean:+.2f}"
        return figure(self.cell.printed) + away


def find(cells: Sequence[Cell], seeds: Sequence[int], wanted: int, out: Path) -> tuple[list[CellRuns], list[str]]:
    """The runs of some cells as they are now, of `wanted` each is to have, and why damaged ones are not among them."""
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
    """A mean with its deviation."""
    return f"{value.mean:.2f}" + (f" ± {value.deviation:.2f}" if value.deviation is not None else "")
