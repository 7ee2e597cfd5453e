"""What an evaluation over real sites found, from its run folder: evaluation.json and its page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fewbytes.base.files import replacing
from fewbytes.core.intervals import LEVEL
from fewbytes.methods.evaluation.evaluation import Evaluation as Method
from fewbytes.methods.evaluation.evaluation import Gathered, MetricFigure, Question, Tested
from fewbytes.report.evaluation import FILE
from fewbytes.report.evaluation_page import write_evaluation
from fewbytes.report.folder import RunFolder
from fewbytes.report.left_out import left_out
from fewbytes.report.pieces import cut
from fewbytes.report.records import Cell, EvaluatedSite, Evaluation, Figure, Models
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
    found = unpack_state(Gathered, read_checkpoint(run.path).server).found
    called = dict(enumerate(names))
    told = {
        client: tested
        for by_client in found.values()
        for client, tested in sorted(by_client.items())
        if tested.samples is not None
    }
    sites = {client: called.get(client, f"client {client}") for client in sorted(told)}
    return Evaluation(
        runs=question.runs,
        metrics={
            name: {"higher": run.higher(name), "share": run.share(name), "percent": run.percent(name)}
            for name in run.metrics
        },
        level=LEVEL,
        sites=[
            EvaluatedSite(name=name, samples=told[client].samples, trained=name in question.trained)
            for client, name in sites.items()
        ],
        models=[Models(name=each.name, kind="shared", run=each.run) for each in question.models],
        cells=[
            _cell(each.name, name, tested)
            for number, each in enumerate(question.models)
            for client, name in sites.items()
            if (tested := found.get(str(number), {}).get(client)) is not None and tested.samples is not None
        ],
        gains=[],
        by=None,
        groups=[],
        classes=run.partition["classes"] if run.partition is not None else [],
        unreported=list(_unreported(run, called, found)),
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


def _cell(models: str, site: str, tested: Tested) -> Cell:
    matrix = tested.confusion.tolist() if len(tested.confusion) else None
    curve = list(zip(tested.predicted, tested.observed, tested.counts, strict=True))
    cell = Cell(
        models=models, of=None, site=site, scores={each.name: _figure(each) for each in tested.figures},
        confusion=matrix,
    )  # fmt: skip
    return cell | {"calibration": curve} if curve else cell


def _figure(told: MetricFigure) -> Figure:
    return Figure(value=told.value, low=told.low, high=told.high)
