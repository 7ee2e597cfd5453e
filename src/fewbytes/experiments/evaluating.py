"""Evaluations at real sites: the settings of their deployment, and their results beside the runs'."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fewbytes.base.errors import UserError
from fewbytes.experiments.groups import GROUPS, DataSettings, LearningSettings, ModelSettings
from fewbytes.experiments.settings import experiment_of
from fewbytes.methods.evaluation.evaluation import Asked, Question
from fewbytes.models.files import read_model
from fewbytes.report import read_runs, write_report
from fewbytes.report.evaluation import FILE, name_of, place_of, read_evaluation
from fewbytes.report.evaluation_page import write_evaluation
from fewbytes.report.folder import RunFolder
from fewbytes.report.records import Evaluation

READ = ("data", "learning", "model")
"""The groups of a run's settings that an evaluation has, too."""
OF_TRAINING = frozenset(
    {"client_data", "public", "part", "augment", "backdoor", "validation", "class_weights"}
    | {"clusters", "secure_aggregation", "secure_range", "recalibrate"}
)
"""But these of them."""


def evaluating(places: Sequence[Path], metrics: Sequence[str]) -> dict[str, Any]:
    """The settings of a deployment that tests the models of runs, or of one `.safetensors` file, at its sites. Raises
    UserError for settings that differ."""
    if len(places) == 1 and places[0].suffix == ".safetensors":
        settings, question = _of_file(places[0])
    else:
        runs = read_runs(places)
        settings, question = _of_runs(runs)
    if metrics:
        settings["metrics"] = list(metrics)
    if "schema" in settings:
        settings.pop("dataset", None)  # the columns' meaning is known: the server needs no table
    settings = {key: value for key, value in settings.items() if key not in OF_TRAINING}
    asked = {"question": msgspec.json.encode(question).decode()}
    return {**settings, "method": "evaluation", "partition": "local", "parameters": asked}


def _of_runs(runs: Sequence[RunFolder]) -> tuple[dict[str, Any], Question]:
    kept = {key for name in READ for key in GROUPS[name].declared()} - OF_TRAINING
    settings = [
        {key: value for key, value in experiment_of(run.path).settings().items() if key in kept} for run in runs
    ]
    for run, other in zip(runs[1:], settings[1:], strict=True):
        if unequal := sorted(key for key in kept if other.get(key) != settings[0].get(key)):
            raise UserError(f"{run.label} and {runs[0].label} differ in {unequal[0]}: evaluate them one by one")
    models = [_asked(run, several=len(runs) > 1) for run in runs]
    trained = [] if runs[0].partition is None else runs[0].partition.get("names", [])
    return settings[0], Question(models, [name_of(run) for run in runs], list(trained))


def _asked(run: RunFolder, several: bool) -> Asked:
    """A run's shared model, the best if it kept that; else the own models, which its sites have kept."""
    prefix = f"{run.label}: " if several else ""
    for name in ("best", "global"):
        if (file := run.path / "models" / f"{name}.safetensors").is_file():
            return Asked(f"{prefix}shared model", run.label, file=str(file.absolute()))
    if not run.total_bytes("both"):
        return Asked("training alone", run.label, kept=name_of(run), kind="alone")
    return Asked(f"{prefix}own models", run.label, kept=name_of(run), kind="own")


def _of_file(path: Path) -> tuple[dict[str, Any], Question]:
    _, about = read_model(path)
    if "schema" not in about:
        raise UserError(f"{path} is not a model of a table: give its run's folder, which names the server's data")
    groups = (DataSettings, LearningSettings, ModelSettings)
    settings = {key: about[key] for group in groups for key in group.declared() if about.get(key) is not None}
    return settings, Question([Asked("model", path.name, file=str(path.absolute()))], [path.name])


def into_runs(folder: Path, runs: Sequence[Path]) -> Evaluation:
    """Copy an evaluation's results from its run folder to the runs', and into their report; returns it. Raises
    UserError if no site reported anything."""
    found = read_evaluation(folder)
    if found is None:
        raise UserError(f"{folder} has no {FILE}: run fewbytes evaluate again")
    if not (len(runs) == 1 and runs[0].suffix == ".safetensors"):
        read = read_runs(runs)
        place = place_of(read)
        shutil.copyfile(folder / FILE, place / FILE)
        write_evaluation(found, place)
        write_report(read, place / "report.html")
    return found
