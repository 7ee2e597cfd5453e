"""Evaluates models on the test sets of sites, without training: `fewbytes evaluate`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fewbytes.base.errors import UserError
from fewbytes.base.files import make_folder, replacing
from fewbytes.base.named import only_allowed
from fewbytes.core.intervals import LEVEL
from fewbytes.core.objective import Objective
from fewbytes.core.objectives import objective_for
from fewbytes.core.tested import Figure, Predictions, Scored, defined, difference
from fewbytes.data import client_folders
from fewbytes.data.joined import joined
from fewbytes.data.schema import Schema
from fewbytes.data.split import Split
from fewbytes.data.subgroups import By, column_values, groups_of
from fewbytes.experiments.baselines import train_alone, train_pooled, train_without
from fewbytes.experiments.groups import DataSettings, ModelSettings
from fewbytes.experiments.loading import Reader, site_names
from fewbytes.experiments.settings import experiment_of
from fewbytes.experiments.tasks import Found, find
from fewbytes.methods.evaluation.evaluation import positive_of
from fewbytes.models.files import load_model, read_model
from fewbytes.report import read_runs
from fewbytes.report.evaluation import COMPARED, FILE, name_of, place_of
from fewbytes.report.evaluation_page import write_evaluation
from fewbytes.report.folder import RunFolder
from fewbytes.report.records import Cell, Evaluation, Gain, Group, Models
from fewbytes.report.records import Figure as Numbers
from fewbytes.running.folder import BASELINES

MOST_AT_ONCE = 20  # maximum number of clients whose models are evaluated without being asked
FEW = 10  # minimum number of samples in a bin of a calibration curve
CROSSED = 12  # maximum number of sites whose own models are tested at every other site
Half = Literal["train", "test"]
ALL = ""  # the site of a shared model


@dataclass(frozen=True)
class Evaluating:
    """What to evaluate besides the runs' models at their sites. `alone`, `pooled`, `without`: train these to compare
    with. `sites`: the place of further sites' data. `by`: a column of tables, as `By` reads it. `metrics`: in place of
    the run's.
    `crossed`: whether sites' own models are tested at other sites, too."""

    alone: bool = False
    pooled: bool = False
    without: tuple[str, ...] = ()
    sites: str | None = None
    by: str | None = None
    metrics: tuple[str, ...] = ()
    crossed: bool = True


@dataclass(frozen=True)
class Site:
    """A site's test samples; `trained`: whether it took part in the runs; `values`: each sample's, of the column of
    subgroups."""

    name: str
    data: Split
    trained: bool
    values: list[str | float | None] = field(default_factory=list)


@dataclass(frozen=True)
class Family:
    """Models of one origin, by the name of their site, or one for ALL."""

    about: Models
    models: dict[str, nn.Module]

    @property
    def name(self) -> str:
        """Its name."""
        return self.about["name"]

    def at(self, site: Site) -> str | None:
        """Whose model is this site's: its own or the shared one; None: it has none."""
        return next((of for of in (ALL, site.name) if of in self.models), None)


@dataclass(frozen=True)
class Learnt:
    """What models learn, and where they are run."""

    objective: Objective
    classes: tuple[str, ...]
    device: str = "cpu"
    precision: Any = "float32"
    seed: int = 0
    positive: int | None = None


def evaluate(
    places: Sequence[Path], how: Evaluating | None = None, out: Path | None = None, found: Found | None = None
) -> tuple[Path, Evaluation]:
    """Evaluate the models of runs, of a folder of runs, or of one `.safetensors` file, on the sites' test sets.

    Writes evaluation.json and evaluation.html into `out` (default: the run's folder, or that of all runs), and returns
    its path and the contents. `found`: the runs' experiment and task, if they are loaded already. Raises UserError for
    runs of different data, runs without models, sites that cannot be read, and unknown columns and sites.
    """
    how = how or Evaluating()
    with only_allowed():
        if len(places) == 1 and places[0].suffix == ".safetensors":
            folder = out or places[0].parent
            learnt, sites, families = _of_file(places[0], how)
            names = [places[0].name]
        else:
            runs = read_runs(places)
            folder = out or place_of(runs)
            learnt, sites, families = _of_runs(runs, how, found)
            names = [name_of(run) for run in runs]
        evaluation = _evaluated(learnt, sites, families, how, names)
    make_folder(folder)
    with replacing(folder / FILE) as file:
        file.write(json.dumps(evaluation, indent=1).encode())
    write_evaluation(evaluation, folder)
    return folder, evaluation


def evaluate_here(place: Path, found: Found, tell: Callable[[str], None]) -> None:
    """Evaluate the run in a folder, or the runs in it, after their end, if there are few clients, with test samples
    here; calls `tell` with the reason if it cannot."""
    clients = found.task.data.clients
    if found.experiment.build_method().promises.describes:  # a survey has no model
        return
    if len(clients) > MOST_AT_ONCE or not any(len(client.test) for client in clients):
        return
    try:
        with only_allowed(*found.experiment.own_code()):  # the user named it for the run
            evaluate([place], Evaluating(crossed=False), found=found)
    except UserError as error:
        tell(f"not evaluated by site: {error}")


# Models and sites -----------------------------------------------------------------------------------------------------


def _of_runs(
    runs: Sequence[RunFolder], how: Evaluating, found: Found | None
) -> tuple[Learnt, list[Site], list[Family]]:
    if unequal := [run.label for run in runs[1:] if run.partition != runs[0].partition]:
        raise UserError(f"{unequal[0]} and {runs[0].label} have other data: evaluate runs on the same sites")
    experiment = experiment_of(runs[0].path) if found is None else found.experiment
    if how.metrics:
        learning = dataclasses.replace(experiment.learning, metrics=list(how.metrics))
        experiment = dataclasses.replace(experiment, learning=learning)
    if experiment.partition.partition == "local" and experiment.data.client_data is None:
        raise UserError(
            f"{runs[0].path} has its data on the sites' machines: copy the run there, or give --sites with data here "
            "and the file models/global.safetensors"
        )
    found = found or find(experiment)
    task = found.task
    data, problem = task.data, task.problem
    names = [data.name_of(i) for i in range(len(data.clients))]
    sites = [
        Site(name, client.test, True, _values(_place(found, i), data.schema, how.by, [("test", client.test)]))
        for i, (name, client) in enumerate(zip(names, data.clients, strict=True))
        if len(client.test)
    ]
    if not sites:
        raise UserError(f"no site of {runs[0].path} has test samples: there is nothing to evaluate on")
    families = [each for run in runs for each in _families(run, names, several=len(runs) > 1)]
    if not families:
        raise UserError(f"{runs[0].path} has no saved model: let it end, or repeat it and save models")
    families += _baselines(runs[0], found, names, how)
    families = list({family.name: family for family in reversed(families)}.values())[::-1]  # one training alone
    reader = Reader(experiment.data, experiment.model)
    sites += _outside(how, reader, found.experiment.data, data.classes, {site.name for site in sites})
    learnt = Learnt(
        problem.objective, tuple(problem.classes), problem.device, problem.precision, problem.seed, positive_of(problem)
    )
    return learnt, sites, families


def _families(run: RunFolder, names: Sequence[str], several: bool) -> Iterator[Family]:
    """The models that a run saved."""
    there = {path.stem for path in (run.path / "models").glob("*.safetensors")}
    own = {name: i for i, name in enumerate(names) if f"client-{i}" in there}
    prefix = f"{run.label}: " if several else ""
    if "global" in there:
        yield Family(Models(name=f"{prefix}shared model", kind="shared", run=run.label), {ALL: load_model(run.path)})
    if own:
        silent = not run.total_bytes("both")
        kind, name = ("alone", "training alone") if silent else ("own", f"{prefix}own models")
        models = {name: load_model(run.path, i) for name, i in own.items()}
        yield Family(Models(name=name, kind=kind, run=run.label), models)  # type: ignore[typeddict-item]


def _baselines(run: RunFolder, found: Found, names: Sequence[str], how: Evaluating) -> Iterator[Family]:
    """What the run is compared with, trained beside it unless it was before."""
    place, rounds = run.path / BASELINES, sum(row["phase"] == "round" for row in run.rounds)
    if how.alone:
        folder = train_alone(found, rounds, place / "alone")
        models = {name: load_model(folder, i) for i, name in enumerate(names)}
        yield Family(Models(name="training alone", kind="alone", run=run.label), models)
    if how.pooled:
        folder = train_pooled(found, rounds, place / "pooled")
        yield Family(Models(name="pooled data", kind="pooled", run=run.label), {ALL: load_model(folder, 0)})
    for site in how.without:
        number = names.index(site) if site in names else 0
        folder = train_without(found, site, place / f"without-{number}")
        if not (folder / "models" / "global.safetensors").exists():
            raise UserError(f"--without needs a method with a shared model, and {run.label} has none: leave it out")
        yield Family(Models(name=f"without {site}", kind="without", run=run.label), {ALL: load_model(folder)})


def _of_file(path: Path, how: Evaluating) -> tuple[Learnt, list[Site], list[Family]]:
    """A model's file, at the sites of --sites."""
    if how.alone or how.pooled or how.without:
        raise UserError("--alone, --pooled and --without train as a run did: give its folder, not a model's file")
    if how.sites is None:
        raise UserError(f"{path} does not name any data: give the sites' data (--sites PLACE), or the run's folder")
    model, about = read_model(path)
    known = {key: about[key] for key in DataSettings.declared() if key in about}
    data = DataSettings.read(known | ({"class_names": about["class_names"]} if "class_names" in about else {}))
    classes = tuple(about.get("class_names", ()))
    sites = _outside(how, Reader(data, ModelSettings.read({})), data, classes, set())
    metrics, positive = list(how.metrics) or about.get("metrics"), about.get("positive")
    number = classes.index(positive) if positive in classes else None
    objective = objective_for(about.get("learns", "classes"), metrics, None, None, len(classes), number)
    family = Family(Models(name="model", kind="shared", run=path.name), {ALL: model})
    return Learnt(objective, classes, positive=number), sites, [family]


def _outside(
    how: Evaluating, reader: Reader, data: DataSettings, classes: Sequence[str], taken: set[str]
) -> list[Site]:
    """The sites of --sites, which did not take part: all their samples are for testing."""
    if how.sites is None:
        return []
    places = client_folders(how.sites)
    known = dataclasses.replace(data, class_names=list(classes))
    sites = []
    for number, (place, name) in enumerate(zip(places, site_names(places), strict=True)):
        read = reader.client(str(place), number, known).numbered(classes)
        halves: list[tuple[Half, Split]] = [("train", read.train), ("test", read.test)]
        parts = [(half, split) for half, split in halves if len(split)]
        values = _values(str(place), read.schema, how.by, parts)
        data_of = joined([split for _, split in parts])
        sites.append(Site(f"{name} (outside)" if name in taken else name, data_of, False, values))
    return sites


def _place(found: Found, client: int) -> str:
    """The place of a client's data."""
    data = found.experiment.data
    return data.dataset if data.client_data is None else str(client_folders(data.client_data)[client])


def _values(
    place: str, schema: Schema | None, by: str | None, splits: Sequence[tuple[Half, Split]]
) -> list[str | float | None]:
    """The values by which a site's samples are grouped, if they are. Raises UserError for data that are not a table."""
    if by is None:
        return []
    if schema is None:
        raise UserError(f"--by {by}: subgroups need a table, and {place} is none: leave --by out")
    column = By.read(by).column
    return [value for half, split in splits for value in column_values(place, schema, column, half, split)]


# Figures --------------------------------------------------------------------------------------------------------------


def _evaluated(
    learnt: Learnt, sites: Sequence[Site], families: Sequence[Family], how: Evaluating, runs: list[str]
) -> Evaluation:
    metrics = learnt.objective.metrics
    found: dict[tuple[str, str, str], Predictions] = {}
    scored: dict[tuple[str, str, str], Scored] = {}  # by the main metric
    cells: list[Cell] = []
    crossed = how.crossed and len(sites) <= CROSSED
    for family in families:
        for number, site in enumerate(sites):
            for of, model in family.models.items():
                if of not in (ALL, site.name) and not (crossed or (family.at(site) is None and how.crossed)):
                    continue
                key = family.name, of, site.name
                seed = learnt.seed + number
                predictions = Predictions.of(model, site.data, learnt.objective, learnt.device, learnt.precision)
                found[key] = predictions
                scores = {
                    metric.name: Scored.of(metric, predictions, seed, of == family.at(site)) for metric in metrics
                }
                scored[key] = scores[metrics[0].name]
                of_classes = site.data.learns == "classes"
                cell = Cell(
                    models=family.name,
                    of=of or None,
                    site=site.name,
                    scores={name: _numbers(each.figure) for name, each in scores.items()},
                    confusion=predictions.confusion() if of_classes else None,
                )
                if of_classes:
                    cell["calibration"] = predictions.calibration(learnt.positive, FEW)
                cells.append(cell)
    return Evaluation(
        runs=runs,
        metrics={m.name: {"higher": m.higher, "share": m.share, "percent": m.in_percent} for m in metrics},
        level=LEVEL,
        sites=[{"name": site.name, "samples": len(site.data), "trained": site.trained} for site in sites],
        models=[family.about for family in families],
        cells=cells,
        gains=list(_gains(sites, families, scored, metrics[0].higher)),
        by=None if how.by is None else By.read(how.by).column,
        groups=[] if how.by is None else list(_groups(learnt, sites, families, found, By.read(how.by).limits)),
        classes=list(learnt.classes),
    )


def _gains(
    sites: Sequence[Site], families: Sequence[Family], scored: dict[tuple[str, str, str], Scored], higher: bool
) -> Iterator[Gain]:
    """Gains of models over training alone, and of the shared model over one without a site: its contribution."""
    alone = next((family for family in families if family.about["kind"] == "alone"), None)
    pairs = [(each, alone) for each in families if alone and each.about["kind"] in ("shared", "own", "pooled")]
    for without in (each for each in families if each.about["kind"] == "without"):
        run = without.about["run"]
        pairs += [(each, without) for each in families if each.about["kind"] == "shared" and each.about["run"] == run]
    for models, over in pairs:
        compared = {
            site.name: (scored[models.name, one, site.name], scored[over.name, other, site.name])
            for site in sites
            if (one := models.at(site)) is not None and (other := over.at(site)) is not None
        }
        known = []  # of sites where the metric has a value
        for name, pair in compared.items():
            gain = _numbers(difference([pair], higher))
            known += [] if gain["value"] is None else [pair]
            yield Gain(models=models.name, over=over.name, site=name, gain=gain)
        if known:
            mean = difference(known, higher)
            yield Gain(models=models.name, over=over.name, site=None, gain=_numbers(mean))


def _groups(
    learnt: Learnt,
    sites: Sequence[Site],
    families: Sequence[Family],
    found: dict[tuple[str, str, str], Predictions],
    limits: Sequence[float],
) -> Iterator[Group]:
    """Each site's own or shared model on each subgroup: at every site, and over the samples of all sites at which all
    have one together."""
    metric, compared = learnt.objective.metrics[0], [each for each in families if each.about["kind"] in COMPARED]
    order, names = groups_of([value for site in sites for value in site.values], limits)
    at, groups = 0, dict[str, list[str]]()
    for site in sites:
        groups[site.name], at = names[at : at + len(site.data)], at + len(site.data)
    for family in compared:
        for group in order:
            parts = {}
            for site in sites:
                rows = torch.tensor([i for i, name in enumerate(groups[site.name]) if name == group]).long()
                if (of := family.at(site)) is not None and len(rows):
                    parts[site.name] = found[family.name, of, site.name].rows(rows)
            common = [
                parts[site.name]
                for site in sites
                if site.name in parts and all(f.at(site) is not None for f in compared)
            ]
            whole: list[tuple[str | None, Predictions]] = [(None, Predictions.together(common))] if common else []
            for place, part in [*whole, *parts.items()]:
                figure = _numbers(Scored.of(metric, part, learnt.seed).figure)
                yield Group(group=group, models=family.name, site=place, samples=len(part), score=figure)


def _numbers(figure: Figure) -> Numbers:
    value, low, high = defined(figure)
    return Numbers(value=value, low=low, high=high)
