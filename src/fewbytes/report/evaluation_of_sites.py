"""What an evaluation over real sites found, from its run folder: evaluation.json and its page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fewbytes.base.errors import listed
from fewbytes.base.files import replacing
from fewbytes.core.intervals import LEVEL, bounds
from fewbytes.data.subgroups import By
from fewbytes.methods.evaluation.evaluation import Asked, Better, Gathered, MetricFigure, Question, Tested
from fewbytes.methods.evaluation.evaluation import Evaluation as Method
from fewbytes.methods.evaluation.subgroups import REASONS, Subgroup
from fewbytes.report.evaluation import COMPARED, FILE
from fewbytes.report.evaluation_page import write_evaluation
from fewbytes.report.folder import RunFolder
from fewbytes.report.left_out import left_out
from fewbytes.report.pieces import cut
from fewbytes.report.records import Cell, EvaluatedSite, Evaluation, Figure, Gain, Group, Models
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.wire import unpack_state


def write_evaluation_of_sites(run: RunFolder, names: Sequence[str] = ()) -> Path:
    """Write evaluation.json and its page into the run folder of an evaluation over real sites; returns the page's path.
    `names`: of the sites, by client."""
    evaluation = evaluation_of_sites(run, names)
    with replacing(run.path / FILE) as file:
        file.write(json.dumps(evaluation, indent=1).encode())
    return write_evaluation(evaluation, run.path)


def evaluation_of_sites(run: RunFolder, names: Sequence[str] = ()) -> Evaluation:
    """The evaluation in a run folder. Sites that reported no figure are in none of its tables."""
    question: Question = Method(question=run.fact("parameters")["question"]).asked
    state = unpack_state(Gathered, read_checkpoint(run.path).server)
    found = state.found
    called = dict(enumerate(names))
    reported = {
        client: tested
        for by_client in found.values()
        for client, tested in sorted(by_client.items())
        if tested.samples is not None
    }
    sites = {client: called.get(client, f"client {client}") for client in sorted(reported)}
    return Evaluation(
        runs=question.runs,
        metrics={
            name: {"higher": run.higher(name), "share": run.share(name), "percent": run.percent(name)}
            for name in run.metrics
        },
        level=LEVEL,
        sites=[
            EvaluatedSite(name=name, samples=reported[client].samples, trained=name in question.trained)
            for client, name in sites.items()
        ],
        models=[Models(name=each.name, kind=each.kind, run=each.run) for each in question.models],
        cells=[
            _cell(each, name, tested)
            for number, each in enumerate(question.models)
            for client, name in sites.items()
            if (tested := found.get(str(number), {}).get(client)) is not None and tested.samples is not None
        ],
        gains=[
            gain
            for i, j in question.pairs()
            for gain in _gains(
                question.models[i].name, question.models[j].name, sites, state.better.get(f"{i} {j}", {})
            )
        ],
        by=By.read(question.by).column if question.by else None,
        groups=[
            Group(group=group.name, models=each.name, site=name, samples=group.samples, score=_figure(group))
            for number, each in enumerate(question.models)
            for client, name in sites.items()
            if each.kind in COMPARED and (tested := found.get(str(number), {}).get(client)) is not None
            for group in tested.groups
        ],
        classes=run.partition["classes"] if run.partition is not None else [],
        unreported=[*_unreported(run, called, found), *_ungrouped(sites, reported, question.by)],
    )


def _unreported(run: RunFolder, called: Mapping[int, str], found: Mapping[str, Mapping[int, Tested]]) -> Iterator[str]:
    """Why sites have no figures."""
    reasons = {left.client: cut(left.why, 200) for left in left_out(run)}
    silent = set.union(set(), *({i for i, tested in by.items() if tested.samples is None} for by in found.values()))
    for client, name in called.items():
        if client in silent:
            yield f"{name} reports no figures: its tell is nothing, or it has fewer test samples than its min-count."
        elif all(client not in by for by in found.values()):
            yield f"{name} has no figures: {reasons.get(client, 'it did not answer')}."


def _ungrouped(sites: Mapping[int, str], reported: Mapping[int, Tested], by: str) -> Iterator[str]:
    """Why sites have no subgroups."""
    column = By.read(by).column
    for why, reason in REASONS.items():
        if names := [name for client, name in sites.items() if reported[client].ungrouped == why]:
            yield f"No subgroups by {column!r} of {listed(names)}: {reason.format(column=column)}."


def _gains(models: str, over: str, sites: Mapping[int, str], better: Mapping[int, Better]) -> Iterator[Gain]:
    """Gains over other models at each site, and on average."""
    draws = {client: _draws(each) for client, each in better.items() if client in sites and each.value is not None}
    values = {client: better[client].value or 0.0 for client in draws}
    for client, value in values.items():
        yield Gain(models=models, over=over, site=sites[client], gain=_gain([value], [draws[client]]))
    if values:
        yield Gain(models=models, over=over, site=None, gain=_gain([*values.values()], [*draws.values()]))


def _draws(better: Better) -> NDArray[np.float64]:
    found = better.draws.numpy().copy()
    found[better.undefined.numpy()] = np.nan
    return found


def _gain(values: Sequence[float], draws: Sequence[NDArray[np.float64]]) -> Figure:
    """The mean of gains, with its interval."""
    value, (low, high) = float(np.mean(values)), bounds(np.mean(draws, axis=0))
    return Figure(value=value, low=None if np.isnan(low) else low, high=None if np.isnan(high) else high)


def _cell(asked: Asked, site: str, tested: Tested) -> Cell:
    matrix = tested.confusion.tolist() if len(tested.confusion) else None
    curve = list(zip(tested.predicted, tested.observed, tested.counts, strict=True))
    scores = {each.name: _figure(each) for each in tested.figures}
    cell = Cell(models=asked.name, of=None if asked.file else site, site=site, scores=scores, confusion=matrix)
    return cell | {"calibration": curve} if curve else cell


def _figure(reported: MetricFigure | Subgroup) -> Figure:
    return Figure(value=reported.value, low=reported.low, high=reported.high)
