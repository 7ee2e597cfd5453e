"""A reproduced table, ours and the paper's: for the terminal, as Markdown, JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import rich.table
from rich.text import Text

from fewbytes.base.files import replacing
from fewbytes.report import pictures, pieces
from fewbytes.report.document import document
from fewbytes.report.pieces import Charts, Layout, Trace
from fewbytes.reproduce.found import CellRuns, figure
from fewbytes.reproduce.grid import Table
from fewbytes.reproduce.verdict import Judged, judged, order


@dataclass(frozen=True)
class Reproduction:
    """A table with its cells' runs and notes; `path` has no suffix."""

    of: Table
    found: Sequence[CellRuns]
    seeds: int  # per cell, when complete
    notes: Sequence[str]
    path: Path
    chosen_rows: Sequence[str]  # requested, to be printed
    chosen_columns: Sequence[str]

    @property
    def rows(self) -> list[str]:
        """The rows' names, in order."""
        return list(dict.fromkeys(f.cell.row for f in self.found))

    @property
    def columns(self) -> list[str]:
        """The columns' names, in order."""
        return list(dict.fromkeys(f.cell.column for f in self.found))

    @property
    def printed(self) -> bool:
        """Whether the paper has any figure for this table."""
        return any(f.cell.printed for f in self.found)

    def at(self, row: str, column: str) -> CellRuns | None:
        """The runs of the cell of that row and column; None if the table has no such cell."""
        return next((f for f in self.found if (f.cell.row, f.cell.column) == (row, column)), None)

    def text(self, found: CellRuns) -> str:
        """Our figure as text, with what is missing; "-" if nothing is measured yet."""
        begun = found.runs.keys() if found.ours is None else found.counted.keys()
        lacking = [f"{len(begun)} of {self.seeds} seeds"] if 0 < len(begun) < self.seeds else []
        if rounds := sorted({found.unfinished[seed] for seed in begun & found.unfinished.keys()}):
            most = f" to {rounds[-1]}" if len(rounds) > 1 else ""
            lacking.append(f"after {rounds[0]}{most} round{'s' if rounds[-1] != 1 else ''}")
        return ("-" if found.ours is None else figure(found.ours)) + (f" [{', '.join(lacking)}]" if lacking else "")

    @property
    def verdicts(self) -> list[str]:
        """A sentence on the paper's order, and one per claim."""
        seen = order(self.every)
        sentences = [seen.sentence(self.seeds)] if seen else []
        if not self.printed and not self.of.claims:
            sentences = ["The paper prints no figures of these cells, so there is no order to compare."]
        return [*sentences, *(each.sentence for each in self.judged)]

    @property
    def every(self) -> list[CellRuns]:
        """All cells: with runs, and not requested so far."""
        there = {(f.cell.row, f.cell.column) for f in self.found}
        others = [cell for cell in self.of.cells if (cell.row, cell.column) not in there]
        return [*self.found, *(CellRuns(cell, {}) for cell in others)]

    @property
    def judged(self) -> list[Judged]:
        """The verdict on each claim."""
        return [judged(claim, self.every) for claim in self.of.claims]

    @property
    def heading(self) -> str:
        """The heading of the table for the terminal."""
        below = "; below ours the paper's, and the difference from ours" if self.printed else ""
        return f"{self.of.title}: {self.of.unit}{below}"

    def table(self) -> rich.table.Table:
        """The table for the terminal: in each requested cell ours, and below it the paper's."""
        table = rich.table.Table()
        table.add_column("")
        columns = [column for column in self.columns if column in self.chosen_columns]
        for column in columns:
            table.add_column(column, justify="right")
        for row in self.rows:
            if row in self.chosen_rows:
                cells = [self.at(row, column) for column in columns]
                table.add_row(row, *(Text() if f is None else self._cell(f) for f in cells))
        return table

    def _cell(self, found: CellRuns) -> Text:
        return Text.assemble(self.text(found), (f"\n{found.theirs}" if self.printed else "", "dim"))

    def markdown(self) -> str:
        """The table and its notes in Markdown, the paper's figures in brackets."""
        brackets = "; the paper's in brackets, and the difference from ours" if self.printed else ""
        lines = [f"# {self.of.title}", "", f"{self.of.unit[0].upper()}{self.of.unit[1:]}{brackets}.", ""]
        lines += [f"| | {' | '.join(self.columns)} |", f"| --- |{' --- |' * len(self.columns)}"]
        for row in self.rows:
            cells = [self.at(row, column) for column in self.columns]
            texts = ["" if f is None else self.text(f) + (f" ({f.theirs})" if f.theirs else "") for f in cells]
            lines.append(f"| {row} | {' | '.join(texts)} |")
        verdicts = [line for verdict in self.verdicts for line in (verdict, "")]
        return "\n".join([*lines, "", *verdicts, *(f"- {note}" for note in self.notes)]) + "\n"

    def chosen(self) -> list[CellRuns]:
        """The requested cells."""
        return [f for f in self.found if f.cell.row in self.chosen_rows and f.cell.column in self.chosen_columns]

    def as_json(self, found: Sequence[CellRuns] | None = None) -> list[dict[str, Any]]:
        """Every cell, or those given, with its figures by seed and its run folders."""
        return [
            {
                "row": f.cell.row,
                "column": f.cell.column,
                "values": f.values,
                "unfinished": f.unfinished,
                "ours": None if f.ours is None else asdict(f.ours),
                "paper": None if f.cell.printed is None else asdict(f.cell.printed),
                "runs": [str(run.path) for run in f.runs.values()],
            }
            for f in (self.found if found is None else found)
        ]

    def write(self) -> None:
        """Write `path`.md, `path`.json and `path`.html."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        texts = {".md": self.markdown(), ".json": json.dumps(self.as_json(), indent=2) + "\n", ".html": page(self)}
        for suffix, text in texts.items():
            with replacing(self.path.with_suffix(suffix)) as file:
                file.write(text.encode())


@dataclass(frozen=True)
class CellText:
    """A cell on the page: ours and the paper's, as text."""

    ours: str
    theirs: str


@dataclass(frozen=True)
class Curves:
    """The chart `name` of a column's runs: its rows, by the index of their colour."""

    name: str
    column: str
    rows: dict[int, str]


def page(reproduction: Reproduction) -> str:
    """One self-contained page: the table, the curves of each column's rows, and the methods' pictures."""
    charts: Charts = {}
    rows: dict[str, list[CellText | None]] = {}
    for row in reproduction.rows:
        cells = [reproduction.at(row, column) for column in reproduction.columns]
        rows[row] = [None if f is None else CellText(reproduction.text(f), f.theirs) for f in cells]
    curved = []
    for number, column in enumerate(reproduction.columns):
        lines = {
            reproduction.rows.index(f.cell.row): f
            for f in reproduction.found
            if f.cell.column == column and f.cell.figure.curve and f.runs
        }
        if lines:
            drawn = Curves(f"curves-{number}", column, {index: f.cell.row for index, f in lines.items()})
            charts[drawn.name] = {"all": ([trace for index, f in lines.items() for trace in _curves(index, f)], _AXES)}
            curved.append(drawn)
    runs = {
        run.path: replace(run, label=f"{f.cell.row}, {f.cell.column}, seed {seed}")
        for f in reproduction.found
        for seed, run in f.runs.items()
    }
    return document(
        "reproduction.html",
        charts,
        title=reproduction.of.title,
        unit=reproduction.of.unit[0].upper() + reproduction.of.unit[1:],
        printed=reproduction.printed,
        columns=reproduction.columns,
        rows=rows,
        verdicts=reproduction.verdicts,
        notes=reproduction.notes,
        curved=curved,
        pictures=pictures.section(list(runs.values()), charts),
    )


_AXES: Layout = {
    "xaxis": {"title": "round", "minallowed": 0},
    "yaxis": {"title": "accuracy", "tickformat": ".1%"},
    "hovermode": "closest",
}


def _curves(index: int, found: CellRuns) -> list[Trace]:
    """The mean over seeds by round and, for several seeds, the band from minimum to maximum."""
    curves: dict[int, list[float]] = {}
    for run in found.runs.values():
        for row, value in run.curve(found.cell.figure.curve):
            curves.setdefault(row["round"], []).append(round(value, 5))
    rounds, colour = sorted(curves), pieces.colour(index)
    band: Trace = {
        "type": "scatter",
        "mode": "lines",
        "fill": "toself",
        "x": rounds + rounds[::-1],
        "y": [max(curves[t]) for t in rounds] + [min(curves[t]) for t in rounds[::-1]],
        "line": {"width": 0},
        "fillcolor": f"{colour}33",
        "hoverinfo": "skip",
    }
    mean: Trace = {
        "type": "scatter",
        "mode": "lines" if len(rounds) > 1 else "markers",
        "x": rounds,
        "y": [round(fmean(curves[t]), 5) for t in rounds],
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour},
        "name": pieces.plain(found.cell.row),
        "hovertemplate": "%{y:.1%} in round %{x}",
    }
    return [band, mean] if len(found.runs) > 1 else [mean]
