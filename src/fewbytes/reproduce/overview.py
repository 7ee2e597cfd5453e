"""All tables of a scale in one document: the papers' claims with verdicts, then every table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fewbytes.reproduce.found import figure
from fewbytes.reproduce.grid import Cell, Scale
from fewbytes.reproduce.reproduction import Reproduction
from fewbytes.reproduce.verdict import Judged


def overview(tables: Mapping[str, Reproduction], scale: Scale, not_here: Mapping[str, str]) -> str:
    """The document in Markdown. `not_here`: tables and figures that are left out, with reasons."""
    lines = [
        f"# The papers' claims and tables, {scale} scale",
        "",
        "Written by `fewbytes reproduce --all" + ("" if scale == "small" else f" --scale {scale}") + "` from the runs "
        "of its tables. A claim is seen if the means over seeds agree with it in every comparison; differences within "
        f"their standard error are too close to tell. {_lasted(tables.values())}",
        "",
        "| claim | command | ours | the paper's | seen |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, reproduction in tables.items():
        lines += [_row(name, scale, reproduction, claim) for claim in reproduction.judged]
    lines += ["", "## Not here", "", *(f"- {what}: {why}" for what, why in not_here.items())]
    for name, reproduction in tables.items():
        first, *rest = reproduction.markdown().rstrip().split("\n")
        lines += ["", f"#{first}", "", f"`{_command(name, scale)}`: {_lasted([reproduction])}", *rest]
    return "\n".join(lines) + "\n"


def _lasted(tables: Iterable[Reproduction]) -> str:
    """The number of distinct runs of the tables, and their total duration."""
    runs = {run.path: run for reproduction in tables for each in reproduction.found for run in each.runs.values()}
    minutes = sum((run.result or {}).get("seconds", 0.0) for run in runs.values()) / 60
    return f"{len(runs)} runs, {minutes:.0f} minutes one after another."


def _command(name: str, scale: Scale) -> str:
    return f"fewbytes reproduce {name}" + ("" if scale == "small" else f" --scale {scale}")


def _row(name: str, scale: Scale, reproduction: Reproduction, claim: Judged) -> str:
    ours = _figures((each.cell, reproduction.text(each)) for each in claim.cells if each.ours)
    theirs = _figures((each.cell, figure(each.cell.printed)) for each in claim.cells if each.cell.printed)
    why = claim.sentence.removeprefix(f"{claim.claim.text}: ")
    return f"| {claim.claim.text} | `{_command(name, scale)}` | {ours} | {theirs} | {why} |"


def _figures(cells: Iterable[tuple[Cell, str]]) -> str:
    """The figures of each column, row by row."""
    columns: dict[str, list[str]] = {}
    for cell, text in cells:
        columns.setdefault(cell.column, []).append(f"{cell.row} {text}")
    return "; ".join(f"{column}: {', '.join(figures)}" for column, figures in columns.items())
