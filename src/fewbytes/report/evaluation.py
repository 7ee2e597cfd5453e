"""The evaluation of runs by site: evaluation.json, or what a run's clients reported, and its parts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fewbytes.base.errors import UserError
from fewbytes.report.folder import RunFolder
from fewbytes.report.records import Cell, Evaluation, Figure, Models

FILE, PAGE = "evaluation.json", "evaluation.html"
COMPARED = ("shared", "own", "alone", "pooled")
"""The kinds of models with a column in the table of sites."""


def read_evaluation(folder: Path) -> Evaluation | None:
    """The evaluation in a folder; None if there is none. Raises UserError for a damaged file."""
    file = folder / FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Evaluation) if file.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({' '.join(str(error).split())}): run fewbytes evaluate again") from None


def place_of(runs: Sequence[RunFolder]) -> Path:
    """The folder of the runs' evaluation: that of one run, or the one that holds several."""
    return runs[0].path if len(runs) == 1 else Path(os.path.commonpath([os.path.realpath(run.path) for run in runs]))


def evaluation_of(runs: Sequence[RunFolder]) -> Evaluation | None:
    """The evaluation of these runs; None if there is none, or only one of other runs."""
    found = read_evaluation(place_of(runs))
    if found is not None and sorted(found["runs"]) == sorted(name_of(run) for run in runs):
        return found
    return _reported(runs[0]) if len(runs) == 1 else None


def _reported(run: RunFolder) -> Evaluation | None:
    """The last score that each client of a run has reported, by kind, without intervals; None if clients have no names,
    or none has reported."""
    names = [] if run.partition is None else run.partition.get("names", [])
    rows = [row["by_client"] for row in run.rounds if row["phase"] != "join" and "by_client" in row]
    cells: dict[tuple[str, str], Cell] = {}
    for metric, kind, client, value in (
        (metric, kind, client, value)
        for row in rows
        for metric, kinds in row.items()
        for kind, clients in kinds.items()
        for client, value in clients.items()
        if client.isdecimal() and int(client) < len(names) and metric in run.metrics
    ):
        site = names[int(client)]
        cell = cells.setdefault((kind, site), Cell(models=kind, of=site, site=site, scores={}, confusion=None))
        cell["scores"][metric] = Figure(value=value, low=None, high=None)
    if not cells or run.partition is None:
        return None
    tested = [sum(of) if isinstance(of, list) else of for of in run.partition["test"]]
    kinds = list(dict.fromkeys(kind for kind, _ in cells))
    return Evaluation(
        runs=[],
        metrics={
            metric: {"higher": run.higher(metric), "share": run.share(metric), "percent": run.percent(metric)}
            for metric in run.metrics
        },
        level=0.0,
        sites=[
            {"name": name, "samples": samples, "trained": True} for name, samples in zip(names, tested, strict=True)
        ],
        models=[Models(name=kind, kind="own", run=run.label) for kind in kinds],
        cells=list(cells.values()),
        gains=[],
        by=None,
        groups=[],
        classes=run.partition["classes"],
    )


def name_of(run: RunFolder) -> str:
    """The name of a run's folder."""
    return run.path.resolve().name


def in_percent(evaluation: Evaluation, metric: str) -> bool:
    """Whether a metric is shown in per cent."""
    traits = evaluation["metrics"][metric]
    return traits["share"] and traits["percent"]


def main_metric(evaluation: Evaluation) -> str:
    """The name of the main metric."""
    return next(iter(evaluation["metrics"]))


def figure_at(evaluation: Evaluation, models: str, site: str, metric: str) -> Figure | None:
    """The figure of a site's own or the shared model at the site."""
    cell = cell_at(evaluation, models, site)
    return None if cell is None else cell["scores"].get(metric)


def cell_at(evaluation: Evaluation, models: str, site: str) -> Cell | None:
    """The cell of a site's own or the shared model at the site; None if there is none."""
    cells = (c for c in evaluation["cells"] if c["models"] == models and c["site"] == site and c["of"] in (None, site))
    return next(cells, None)
