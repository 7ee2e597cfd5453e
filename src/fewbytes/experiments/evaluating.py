"""Evaluations at real sites: the settings of their deployment, further runs there, and the results beside the runs'."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fewbytes.base.errors import UserError
from fewbytes.experiments.baselines import alone, check_without
from fewbytes.experiments.evaluate import Evaluating
from fewbytes.experiments.groups import GROUPS, DataSettings, LearningSettings, ModelSettings
from fewbytes.experiments.settings import experiment_of
from fewbytes.methods.evaluation.evaluation import Asked, Evaluation, Question
from fewbytes.models.files import read_model
from fewbytes.report import read_runs, write_report
from fewbytes.report.evaluation import FILE, name_of, place_of, read_evaluation
from fewbytes.report.evaluation_page import write_evaluation
from fewbytes.report.folder import RunFolder
from fewbytes.report.records import Evaluation as Results
from fewbytes.running.folder import BASELINES

ALONE = "training alone"
READ = ("data", "learning", "model")
"""The groups of a run's settings that an evaluation has, too."""
OF_TRAINING = frozenset(
    {"client_data", "public", "part", "augment", "backdoor", "validation", "class_weights"}
    | {"clusters", "secure_aggregation", "secure_range", "recalibrate"}
)
"""But these of them."""
ELSEWHERE = frozenset(
    {"client_data", "clients", "newcomers", "arrival", "engine", "workers", "speeds", "links", "ray_address"}
    | {"round_timeout", "connect_timeout", "min_replies"}
)
"""A run's settings that a further run at the sites does not have: of its machines, and of how long they are waited
for."""


@dataclass(frozen=True)
class Repeat:
    """A further run at the sites, to compare with: the name of its models, its settings, the sites that train, and the
    folder for it."""

    name: str
    settings: dict[str, Any]
    sites: tuple[str, ...]
    place: Path

    def begun(self) -> Path | None:
        """The folder of this run, if it was begun before; None if not."""
        return next((folder.parent for folder in self.place.glob("*/deployment")), None)


def repeats(places: Sequence[Path], how: Evaluating) -> list[Repeat]:
    """The runs that the sites train for an evaluation: alone, and without a site. Raises UserError for what needs all
    sites' samples on one machine, and for an unknown site."""
    if how.pooled:
        raise UserError(
            "--pooled needs all sites' samples on one machine, and these stay at the sites: use --alone, which "
            "compares with training at each site alone"
        )
    if how.sites is not None:
        raise UserError(
            "--sites names data on this machine: leave it out, as members that never trained are tested, too"
        )
    if not (how.alone or how.without):
        return []
    if places[0].suffix == ".safetensors":
        raise UserError("--alone and --without train as a run did: give its folder, not a model's file")
    return [*_repeats(read_runs(places)[0], how)]


def _repeats(run: RunFolder, how: Evaluating) -> Iterator[Repeat]:
    experiment, place = experiment_of(run.path), run.path / BASELINES
    names = tuple(() if run.partition is None else run.partition.get("names", ()))
    if not names:
        raise UserError(f"{run.path} does not name its sites: --alone and --without need a run of --partition local")
    settings = {key: value for key, value in experiment.settings().items() if key not in ELSEWHERE}
    settings["partition"] = "local"
    if how.alone:
        kept = {"partition", *(key for name in READ for key in GROUPS[name].declared())}
        method, rounds = alone(experiment), sum(row["phase"] == "round" for row in run.rounds)
        own = {k: v for k, v in settings.items() if k in kept and k not in ("clusters", "secure_aggregation")}
        own |= {"method": method.method_name, "parameters": method.parameters}
        yield Repeat(ALONE, own | {"rounds": rounds, "evaluate_every": rounds}, names, place / "alone-at-sites")
    for site in how.without:
        check_without(site, names, bool(experiment.partition.newcomers))
        rest = tuple(name for name in names if name != site)
        yield Repeat(f"without {site}", settings, rest, place / f"without-{names.index(site)}-at-sites")


def evaluating(
    places: Sequence[Path], how: Evaluating | None = None, beside: Mapping[str, Path] | None = None
) -> dict[str, Any]:
    """The settings of a deployment that tests the models of runs, or of one `.safetensors` file, at its sites.
    `beside`: the folders of further runs, by the names of their `Repeat`s. Raises UserError for settings that
    differ."""
    how = how or Evaluating()
    if len(places) == 1 and places[0].suffix == ".safetensors":
        settings, question = _of_file(places[0])
    else:
        settings, question = _of_runs(read_runs(places), beside or {})
    question.by = how.by or ""
    if how.metrics:
        settings["metrics"] = list(how.metrics)
    if "schema" in settings:
        settings.pop("dataset", None)  # the columns' meaning is known: the server needs no table
    settings = {key: value for key, value in settings.items() if key not in OF_TRAINING}
    asked = {"question": msgspec.json.encode(question).decode()}
    return {**settings, "method": "evaluation", "partition": "local", "parameters": asked}


def _of_runs(runs: Sequence[RunFolder], beside: Mapping[str, Path]) -> tuple[dict[str, Any], Question]:
    kept = {key for name in READ for key in GROUPS[name].declared()} - OF_TRAINING
    settings = [
        {key: value for key, value in experiment_of(run.path).settings().items() if key in kept} for run in runs
    ]
    for run, other in zip(runs[1:], settings[1:], strict=True):
        if unequal := sorted(key for key in kept if other.get(key) != settings[0].get(key)):
            raise UserError(f"{run.label} and {runs[0].label} differ in {unequal[0]}: evaluate them one by one")
    models, label = [each for run in runs for each in _asked(run, several=len(runs) > 1)], runs[0].label
    for name, folder in beside.items():
        if name == ALONE:
            models = [each for each in models if each.kind != "alone"]
            models.append(Asked(name, label, str(folder.resolve()), kind="alone"))
        elif (file := _shared_file(folder)) is not None:
            models.append(Asked(name, label, str(folder.resolve()), file, "without"))
        else:
            raise UserError(f"--without needs a method with a shared model, and {label} has none: leave it out")
    trained = [] if runs[0].partition is None else runs[0].partition.get("names", [])
    return settings[0], Question(models, [name_of(run) for run in runs], list(trained))


def _asked(run: RunFolder, several: bool) -> Iterator[Asked]:
    """A run's shared model, and the own models which its sites have kept."""
    prefix, folder = f"{run.label}: " if several else "", str(run.path.absolute())
    if (file := _shared_file(run.path)) is not None:
        yield Asked(f"{prefix}shared model", run.label, folder, file)
    experiment = experiment_of(run.path)
    lora = experiment.model.lora
    if not experiment.build_method().has_local_models(lora is not None and lora.own):
        return
    if run.total_bytes("both"):
        yield Asked(f"{prefix}own models", run.label, folder, kind="own")
    else:
        yield Asked(ALONE, run.label, folder, kind="alone")


def _shared_file(run: Path) -> str | None:
    """The file of a run's shared model in its folder, the best if it kept that; None if it has none."""
    files = (f"models/{name}.safetensors" for name in ("best", "global"))
    return next((file for file in files if (run / file).is_file()), None)


def _of_file(path: Path) -> tuple[dict[str, Any], Question]:
    _, about = read_model(path)
    learns = about.get("learns", "classes")
    if "schema" not in about and (learns != "classes" or "tensors" in about):
        raise UserError(f"{path} learns {learns}: give its run's folder, which names the server's data")
    groups = (DataSettings, LearningSettings, ModelSettings)
    settings = {key: about[key] for group in groups for key in group.declared() if about.get(key) is not None}
    place = path.absolute()
    return settings, Question([Asked("model", path.name, str(place.parent), place.name)], [path.name])


def into_runs(folder: Path) -> Results:
    """Copy an evaluation's results from its run folder to the runs', and into their report; returns it. Raises
    UserError if no site reported anything, and for runs that are no longer where they were."""
    found = read_evaluation(folder)
    if found is None:
        raise UserError(f"{folder} has no {FILE}: run fewbytes evaluate again")
    method = experiment_of(folder).build_method()
    assert isinstance(method, Evaluation)
    asked = method.asked
    if runs := [*dict.fromkeys(Path(each.folder) for each in asked.models if Path(each.folder).name in asked.runs)]:
        read = read_runs(runs)
        place = place_of(read)
        shutil.copyfile(folder / FILE, place / FILE)
        write_evaluation(found, place)
        write_report(read, place / "report.html")
    return found
