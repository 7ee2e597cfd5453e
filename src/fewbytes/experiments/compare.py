"""Comparisons: several methods, or all, on the same clients."""

from __future__ import annotations

import json
import shutil
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fewbytes.base.errors import UserError, listed, suggestion
from fewbytes.base.files import replacing
from fewbytes.base.ranges import Share
from fewbytes.core.method import Method
from fewbytes.core.training import Local
from fewbytes.experiments.display import Display, note
from fewbytes.experiments.evaluate import evaluate_here
from fewbytes.experiments.new_folders import new_folder
from fewbytes.experiments.prepared import PreparedRun
from fewbytes.experiments.run_folders import begun, finished
from fewbytes.experiments.settings import make_experiment, make_method, typed
from fewbytes.methods import METHODS, method_class, short_name
from fewbytes.models.builders import SMALL_RESNET
from fewbytes.report import choices, read_runs, write_report
from fewbytes.report.choice import a_round, unequal
from fewbytes.running.recorders import watcher_of
from fewbytes.running.rounding import unrounded
from fewbytes.running.settings import ROUNDING

TERMS: dict[str, Any] = {"model": SMALL_RESNET, "rounds": 6, "public": 100}
"""Defaults when all methods are compared: a model that every method can train, and public samples, taken from the
training data, for methods that distil on the server."""
TRAINING: dict[str, Any] = {"fraction": 1.0, "epochs": 2, "steps": 0, "lr": 0.1, "batch": 20, "momentum": 0.9}
"""Hyper-parameters of local training, for the methods that have them."""
ASKED = "comparison.json"  # the methods and settings of a comparison, in its folder


def equal_parameters(name: str, rounds: int, training: dict[str, Any]) -> dict[str, Any]:
    """A method's parameters on these terms; one-shot methods train for the same total number of epochs."""
    method = make_method(name, {})
    length = (training["steps"] or training["epochs"]) * (rounds if method.own_rounds else 1)
    parameters = method.quick(length).parameters
    same = training | {"steps": parameters.get("epochs") if training["steps"] else 0}
    return parameters | {key: value for key, value in same.items() if key in parameters and key != "epochs"}


def _training(given: dict[str, Any]) -> dict[str, Any]:
    """TRAINING, updated with the given values, numbers or text. Raises UserError."""
    fraction, kinds = {"fraction": Share}, typing.get_type_hints(Local, include_extras=True)
    training = TRAINING | typed("local training", kinds | fraction, given)
    Local(**{key: value for key, value in training.items() if key not in fraction})  # its ranges
    return training


def _terms(names: Sequence[str], rounds: int, training: dict[str, Any]) -> str:
    """The terms in words."""
    counted, other = ("steps", "epochs") if training["steps"] else ("epochs", "steps")
    listed = ", ".join(f"{key} {value:g}" for key, value in training.items() if key != other)
    once = training[counted] * rounds
    methods = [make_method(name, {}) for name in names]
    fewer = "".join(
        f"{method.method_name} in {count} rounds, "
        for method in methods
        if (count := method.quick(once).planned_rounds(rounds)) != method.planned_rounds(rounds)
    )
    return (
        f"all methods use the same training: {listed}, {rounds} rounds (one-shot methods: {once} {counted}), "
        f"{fewer}and servers that generate or distil take fewer steps than in their papers; servers that need public "
        f"data get {TERMS['public']} training samples, held out from clients; --rounds, --set and --public change this"
    )


def compare(
    names: list[str], settings: dict[str, Any], out: Path, resume: Path | None = None, watch: Sequence[str] = ()
) -> tuple[Path, list[dict[str, Any]]]:
    """Run some methods with their own defaults, or ["all"] on equal terms, into a new folder below `out`.

    Returns the folder, and each method's result.json. A method that cannot run on the task, or fails, is reported and
    the others still run. `resume`: the folder of an interrupted comparison, which overrides `names` and `settings`.
    `watch`: arguments of `watcher_of`; each method is logged as a run of its own.
    """
    for text in watch:
        watcher_of(text, "")  # refused before anything is written
    if resume is not None:
        names, settings = _asked(resume)
    asked = json.dumps({"methods": names, "settings": settings}, indent=2)
    jobs = _all(settings) if names == ["all"] else _some(names, settings)
    called = [name for name, _ in jobs]
    if twice := {name for name in called if called.count(name) > 1}:
        raise UserError(f"two of the methods are called {twice.pop()}: their results would have the same name")
    if resume is None:
        folder = new_folder(out, "compare")
        with replacing(folder / ASKED) as file:
            file.write(asked.encode())
    else:
        folder = resume
    try:
        results = [
            _result(name, job, folder, watch, f"{number} of {len(jobs)}") for number, (name, job) in enumerate(jobs, 1)
        ]
    except KeyboardInterrupt:
        if any(finished(folder / name) for name, _ in jobs):
            write_report(read_runs([folder]), folder / "report.html")
        raise
    if not any((folder / name / "config.toml").exists() for name, _ in jobs):
        shutil.rmtree(folder)
        raise UserError(f"no method can run here; {jobs[0][0]}: {results[0]['why']}")
    ended = [job for name, job in jobs if isinstance(job, PreparedRun) and finished(folder / name)]
    if ended:
        evaluate_here(folder, ended[0].found, note)
    runs = read_runs([folder])
    write_report(runs, folder / "report.html")
    found = choices(runs)
    return folder, [r | {"recommended": {c.kind: str(c) for c in found if c.label == r["method"]}} for r in results]


class _Asked(msgspec.Struct):
    """The methods and settings of a comparison."""

    methods: list[str]
    settings: dict[str, Any]


def _asked(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """The methods and settings of the comparison in a folder. Raises UserError if it is missing or unreadable."""
    try:
        asked = msgspec.json.decode((folder / ASKED).read_bytes(), type=_Asked)
    except OSError:
        those = sorted(path.parent for path in folder.glob(f"*/{ASKED}"))
        such = f"; resume one of those in it, such as {those[-1]}" if those else ""
        raise UserError(f"{folder} is not a comparison's folder{such}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / ASKED} is damaged ({error}): start the comparison again") from None
    return asked.methods, asked.settings


def _result(name: str, job: PreparedRun | str, folder: Path, watch: Sequence[str], place: str) -> dict[str, Any]:
    """One method's result.json, after running or resuming it in the comparison's folder, or the reason there is none.
    `place`: its position, as in `2 of 3`."""
    run = folder / name
    try:
        if isinstance(job, str):
            raise UserError(job)
        if finished(run):
            return json.loads((run / "result.json").read_text())  # type: ignore[no-any-return]
        watchers = [watcher_of(text, f"{folder.absolute().name}/{name}") for text in watch]
        display = Display(name, folder, job.experiment.resuming("compare"), job.method.promises.headline, place)
        return job.execute(run, begun(run), page=False, display=display, watchers=watchers)
    except OSError:
        raise
    except Exception as error:
        has_begun = (run / "config.toml").exists()
        status, why = "failed" if has_begun else "left out", str(error) or type(error).__name__
        note(f"{name} {'failed' if has_begun else 'is left out'}: {why}")
        return {"method": name, "status": status, "why": why}


def _some(names: list[str], settings: dict[str, Any]) -> list[tuple[str, PreparedRun | str]]:
    """Jobs for methods with their own defaults and the given parameters. Raises UserError if any is wrong."""
    settings = dict(settings)
    own = _per_method(names, settings.pop("parameters", {}))
    choosy = (name for name in names if method_class(name).model_for is not Method.model_for)
    leader = next(choosy, names[0])  # its default model is used, if none is given
    first = PreparedRun(_own(settings, leader, own[leader]))
    settings |= _settled(first)
    others = {n: PreparedRun(_own(settings, n, own[n]), first.task) for n in names if n != leader}
    jobs = [first if name == leader else others[name] for name in names]
    _note_unequal_training(jobs)
    return list(zip(map(short_name, names), jobs, strict=True))


def _all(settings: dict[str, Any]) -> list[tuple[str, PreparedRun | str]]:
    """Jobs for every method on equal terms, or the reason there is none. Raises UserError for errors common to all."""
    split = settings.get("partition") != "local"  # else no samples can be held out for servers that distil
    settings = {key: value for key, value in TERMS.items() if split or key != "public"} | settings
    names, broken = _usable()
    given = dict(settings.pop("parameters", {}))
    training = _training({key: given.pop(key) for key in TRAINING if key in given})
    own = _per_method(names, given)
    leader = next(name for name in names if not make_method(name, {}).own_rounds)  # newcomers may join it
    rounds = make_experiment({**settings, "method": leader}).run.rounds
    parameters = equal_parameters(leader, rounds, training) | own[leader]
    first = PreparedRun(_own(settings, leader, parameters))
    settings |= _settled(first)
    note(_terms(names, rounds, training))
    jobs: list[tuple[str, PreparedRun | str]] = list(broken.items())
    for name in names:
        parameters = equal_parameters(name, rounds, training) | own[name]
        try:
            jobs.append((short_name(name), PreparedRun(_own(settings, name, parameters), first.task)))
        except UserError as error:
            jobs.append((short_name(name), str(error)))
    return jobs


def _own(settings: dict[str, Any], name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The settings of one method's run: the common ones, without rounding where the method sends nothing to round."""
    method = make_method(name, {})
    for way, keys in ROUNDING.items():
        without = [key for key in keys if key in settings]
        if without and (why := unrounded(method, way)):
            note(f"{short_name(name)}: {why}; it runs without {' and '.join(without)}")
            settings = {key: value for key, value in settings.items() if key not in without}
    if "bits" in settings and all(unrounded(method, way) for way in ROUNDING):
        note(f"{short_name(name)}: {unrounded(method, 'uplink')}; it runs without bits")
        settings = {key: value for key, value in settings.items() if key != "bits"}
    return {**settings, "method": name, "parameters": parameters}


def _settled(first: PreparedRun) -> dict[str, Any]:
    """What the first run determined for all: the model, and the statistics that normalise samples."""
    found = first.experiment.model.written()
    return {key: found[key] for key in ("model", "normalise") if key in found}


def _usable() -> tuple[list[str], dict[str, str]]:
    """The names of all usable methods, and why others from installed packages cannot be used."""
    names: list[str] = []
    broken: dict[str, str] = {}
    for name in METHODS:
        try:
            make_method(name, {})
        except UserError as error:
            broken[name] = str(error)
        else:
            names.append(name)
    return names, broken


def _per_method(names: list[str], parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Parameters per method: METHOD.KEY for one, KEY for all that have it. Raises UserError if none has it."""
    own: dict[str, dict[str, Any]] = {name: {} for name in names}
    fields = {name: set(make_method(name, {}).parameters) for name in names}
    for key, value in parameters.items():
        name, dot, rest = key.rpartition(".")
        if dot and not any(name in (n, short_name(n)) for n in names):
            raise UserError(f"--set {key}: {name!r} is not among the methods compared: {', '.join(names)}")
        takers = [n for n in names if (name in (n, short_name(n)) if dot else rest in fields[n])]
        if not takers:
            known = sorted(set.union(*fields.values()))
            raise UserError(f"--set {key}: no method compared has a parameter {rest!r}{suggestion(rest, known)}")
        for taker in takers:
            own[taker][rest] = value
    return own


def _note_unequal_training(jobs: Sequence[PreparedRun]) -> None:
    """Print which settings of local training differ between the compared methods."""
    rounds = {job: job.experiment.run.rounds for job in jobs if job.method.own_rounds}
    given = {
        job.method.method_name: a_round(job.method.parameters, rounds[job]) if job in rounds else job.method.parameters
        for job in jobs
    }
    for key, values in unequal(given).items():
        text = ", ".join(f"{value} ({listed(names, 3)})" for value, names in values)
        note(f"{key} differs: {text} (--set {key}=VALUE makes it equal)")
