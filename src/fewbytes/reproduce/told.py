"""Tells what came of a table: ours beside the paper's, in the terminal, as Markdown, as JSON and as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import rich.table
from rich.markup import escape as escape_markup

from fewbytes.files import replacing
from fewbytes.report import pictures, pieces
from fewbytes.report.folder import RunFolder, read_run
from fewbytes.report.page import document
from fewbytes.report.pieces import Charts, Layout, Trace
from fewbytes.reproduce.grid import Cell, Printed, Table
from fewbytes.reproduce.running import finished, folder_of


@dataclass(frozen=True)
class Found:
    """A cell and its runs, those that have begun, by seed."""

    cell: Cell
    runs: dict[int, RunFolder]

    @property
    def values(self) -> dict[int, float]:
        """The cell's figure of every run that has come so far."""
        figures = {seed: self.cell.figure(run) for seed, run in self.runs.items()}
        return {seed: figure for seed, figure in figures.items() if figure is not None}

    @property
    def ours(self) -> Printed | None:
        """Mean and, of several seeds, standard deviation (n - 1)."""
        values = list(self.values.values())
        return Printed(fmean(values), stdev(values) if len(values) > 1 else None) if values else None

    @property
    def rounds(self) -> int | None:
        """The fewest rounds that a run not yet done has behind it; None if all are done."""
        counts = [
            sum(row["phase"] == "round" for row in run.rounds) for run in self.runs.values() if not finished(run.path)
        ]
        return min(counts, default=None)

    @property
    def theirs(self) -> str:
        """The paper's in words, nothing where it has none."""
        return "" if self.cell.printed is None else figure(self.cell.printed)

    def text(self) -> str:
        """Ours in words, "-" where there is nothing yet."""
        if self.ours is None:
            return "-"
        return figure(self.ours) + (f" [{self.rounds} rounds]" if self.rounds is not None else "")


def find(cells: Sequence[Cell], seeds: Sequence[int], out: Path) -> list[Found]:
    """The runs of some cells as they are now."""
    folders = {folder_of(cell, seed, out) for cell in cells for seed in seeds}
    read = {folder: read_run(folder) for folder in folders if (folder / "rounds.jsonl").exists()}
    return [
        Found(cell, {seed: read[folder] for seed in seeds if (folder := folder_of(cell, seed, out)) in read})
        for cell in cells
    ]


def figure(value: Printed) -> str:
    """A mean with its deviation."""
    return f"{value.mean:.2f}" + (f" ± {value.deviation:.2f}" if value.deviation is not None else "")


@dataclass(frozen=True)
class Reproduction:
    """A table with what was found for (some of) its cells, and what is to be known of it; `path` is without suffix."""

    of: Table
    found: Sequence[Found]
    notes: Sequence[str]
    path: Path

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(f.cell.row for f in self.found))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(f.cell.column for f in self.found))

    def at(self, row: str, column: str) -> Found | None:
        return next((f for f in self.found if (f.cell.row, f.cell.column) == (row, column)), None)

    def table(self) -> rich.table.Table:
        """For the terminal: ours, and below it the paper's in every cell."""
        made = rich.table.Table(title=f"{self.of.title}: {self.of.unit}; below ours the paper's", title_justify="left")
        made.add_column("")
        for column in self.columns:
            made.add_column(column, justify="right")
        for row in self.rows:
            cells = [self.at(row, column) for column in self.columns]
            made.add_row(row, *("" if f is None else f"{escape_markup(f.text())}\n[dim]{f.theirs}[/]" for f in cells))
        return made

    def markdown(self) -> str:
        """The table with what is to be known of it, the paper's figures in brackets."""
        lines = [f"# {self.of.title}", "", f"{self.of.unit[0].upper()}{self.of.unit[1:]}; the paper's in brackets.", ""]
        lines += [f"| | {' | '.join(self.columns)} |", f"| --- |{' --- |' * len(self.columns)}"]
        for row in self.rows:
            cells = [self.at(row, column) for column in self.columns]
            texts = ["" if f is None else f.text() + (f" ({f.theirs})" if f.theirs else "") for f in cells]
            lines.append(f"| {row} | {' | '.join(texts)} |")
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]) + "\n"

    def as_json(self) -> list[dict[str, Any]]:
        """Every cell with its figures by seed, and its run folders."""
        return [
            {
                "row": f.cell.row, "column": f.cell.column, "values": f.values, "rounds": f.rounds,
                "ours": None if f.ours is None else asdict(f.ours),
                "paper": None if f.cell.printed is None else asdict(f.cell.printed),
                "runs": [str(run.path) for run in f.runs.values()],
            }
            for f in self.found
        ]  # fmt: skip

    def write(self) -> None:
        """Write `path`.md, `path`.json and `path`.html."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        texts = {
            ".md": self.markdown(),
            ".json": json.dumps(self.as_json(), indent=2) + "\n",
            ".html": page(self),
        }
        for suffix, text in texts.items():
            with replacing(self.path.with_suffix(suffix)) as file:
                file.write(text.encode())


def page(made: Reproduction) -> str:
    """One self-contained page: the table, for each column the curves of its rows, and what methods showed."""
    charts: Charts = {}
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in made.columns)
    body = "".join(
        f'<tr><th scope="row">{escape(row)}</th>{"".join(_shown(made.at(row, column)) for column in made.columns)}</tr>'
        for row in made.rows
    )
    unit = escape(made.of.unit[0].upper() + made.of.unit[1:])
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in made.notes)
    sections = [
        f"""<header><p class="eyebrow">fewbytes reproduction</p><h1>{escape(made.of.title)}</h1></header>
<section><h2>Ours and the paper's</h2><p>{unit}; the paper's below ours.</p>
<div class="wide" role="region" aria-label="Ours and the paper's" tabindex="0">
<table><thead><tr><th scope="col"></th>{head}</tr></thead><tbody>{body}</tbody></table></div>{notes}</section>"""
    ]
    for number, column in enumerate(made.columns):
        lines = [f for f in made.found if f.cell.column == column and f.cell.kind and f.runs]
        if not lines:
            continue
        name, indices = f"curves-{number}", [made.rows.index(f.cell.row) for f in lines]
        traces = [trace for index, f in zip(indices, lines, strict=True) for trace in _curves(index, f)]
        charts[name] = {"all": (traces, _AXES)}
        key = "".join(
            f"<span>{pieces.dot(index)}{escape(f.cell.row)}</span>" for index, f in zip(indices, lines, strict=True)
        )
        drawn = pieces.chart(name, "Accuracy over rounds, a line a seed", f"Line chart of accuracy: {column}", 380)
        sections.append(f'<section><h2>{escape(column)}</h2><p class="legend">{key}</p>{drawn}</section>')
    runs = {run.path: run for f in made.found for run in f.runs.values()}
    sections.append(pictures.section(list(runs.values()), charts))
    return document(made.of.title, "\n".join(sections), charts)


def _shown(found: Found | None) -> str:
    if found is None:
        return "<td></td>"
    theirs = f"<small>{found.theirs}</small>" if found.theirs else ""
    return f'<td class="strong">{escape(found.text())}{theirs}</td>'


_AXES: Layout = {
    "xaxis": {"title": "round"},
    "yaxis": {"title": "accuracy", "tickformat": ".0%"},
    "hovermode": "closest",
}


def _curves(index: int, found: Found) -> list[Trace]:
    traces: list[Trace] = []
    for seed, run in found.runs.items():
        curve = run.curve(found.cell.kind)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [row["round"] for row, _ in curve],
                "y": [round(value, 5) for _, value in curve],
                "line": {"color": pieces.colour(index), "width": 2},
                "name": pieces.plain(f"{found.cell.row}, seed {seed}"),
                "hovertemplate": "%{y:.1%} in round %{x}",
            }
        )
    return traces
