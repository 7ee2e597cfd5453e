"""The terms of a comparison: the settings of each method, by its own defaults or equal for all, on the same clients."""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fewbytes.base.errors import UserError, listed, suggestion
from fewbytes.base.ranges import Share
from fewbytes.core.method import Method
from fewbytes.core.training import Local
from fewbytes.experiments.prepared import PreparedRun
from fewbytes.experiments.settings import make_experiment, make_method, typed
from fewbytes.methods import METHODS, method_class, short_name
from fewbytes.models.builders import SMALL_RESNET
from fewbytes.report.choice import a_round, unequal
from fewbytes.running.rounding import unrounded
from fewbytes.running.settings import ROUNDING

TERMS: dict[str, Any] = {"model": SMALL_RESNET, "rounds": 6, "public": 100}
"""Defaults when all methods are compared: a model that every method can train, and public samples, taken from the
training data, for methods that distil on the server."""
TRAINING: dict[str, Any] = {"fraction": 1.0, "epochs": 2, "steps": 0, "lr": 0.1, "batch": 20, "momentum": 0.9}
"""Hyper-parameters of local training, for the methods that have them."""


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


@dataclass(frozen=True)
class Bench:
    """The methods of a comparison with one seed: the name of each as given, and the settings of its run or the reason
    why it cannot run, by short name; a prepared run, whose task is that of all; the method that this is of."""

    named: dict[str, str]
    settings: dict[str, dict[str, Any] | str]
    first: PreparedRun
    leader: str

    def prepared(self, name: str, parameters: dict[str, Any], workers: int | None = None) -> PreparedRun:
        """A method's run, with these parameters besides its own. Raises UserError if it cannot run."""
        settings = self.settings[name]
        if isinstance(settings, str):
            raise UserError(settings)
        if name == self.leader and not parameters and workers is None:
            return self.first
        if parameters:
            settings = settings | {"parameters": make_experiment(settings).parameters | parameters}
        if workers is not None:
            settings = {"workers": workers} | settings
        return PreparedRun(settings, self.first.task)


def bench_of(names: list[str], settings: dict[str, Any], tuned: Collection[str], tell: Callable[[str], None]) -> Bench:
    """Methods with their own defaults, or ["all"] on equal terms, for the clients and the seed of the settings.

    `tuned`: parameters whose values differ on purpose. `tell` gets the terms in words. Raises UserError for errors
    common to all, and for any error of a method that is named.
    """
    bench = _all(settings, tell) if names == ["all"] else _some(names, settings, tuned, tell)
    called = [short_name(name) for name in names] if names != ["all"] else list(bench.settings)
    if twice := {name for name in called if called.count(name) > 1}:
        raise UserError(f"two of the methods are called {twice.pop()}: their results would have the same name")
    return bench


def _some(names: list[str], settings: dict[str, Any], tuned: Collection[str], tell: Callable[[str], None]) -> Bench:
    """Methods with their own defaults and the given parameters. Raises UserError if any is wrong."""
    settings = dict(settings)
    own = per_method(names, settings.pop("parameters", {}))
    choosy = (name for name in names if method_class(name).model_for is not Method.model_for)
    leader = next(choosy, names[0])  # its default model is used, if none is given
    first = PreparedRun(_own(settings, leader, own[leader], tell))
    settings |= _settled(first)
    each = {name: _own(settings, name, own[name], tell if name != leader else _quietly) for name in names}
    jobs = [first if name == leader else PreparedRun(each[name], first.task) for name in names]
    _note_unequal_training(jobs, tuned, tell)
    short = {short_name(name): name for name in names}
    return Bench(short, {key: each[name] for key, name in short.items()}, first, short_name(leader))


def _all(settings: dict[str, Any], tell: Callable[[str], None]) -> Bench:
    """Every method on equal terms, or the reason why it cannot run. Raises UserError for errors common to all."""
    split = settings.get("partition") != "local"  # else no samples can be held out for servers that distil
    settings = {key: value for key, value in TERMS.items() if split or key != "public"} | settings
    names, broken = _usable()
    given = dict(settings.pop("parameters", {}))
    training = _training({key: given.pop(key) for key in TRAINING if key in given})
    own = per_method(names, given)
    leader = next(name for name in names if not make_method(name, {}).own_rounds)  # newcomers may join it
    rounds = make_experiment({**settings, "method": leader}).run.rounds
    parameters = equal_parameters(leader, rounds, training) | own[leader]
    first = PreparedRun(_own(settings, leader, parameters, _quietly))
    settings |= _settled(first)
    tell(_terms(names, rounds, training))
    found: dict[str, dict[str, Any] | str] = dict(broken)
    for name in names:
        mine = _own(settings, name, equal_parameters(name, rounds, training) | own[name], tell)
        try:
            PreparedRun(mine, first.task)
            found[short_name(name)] = mine
        except UserError as error:
            found[short_name(name)] = str(error)
    named = {name: name for name in broken} | {short_name(name): name for name in names}
    return Bench(named, found, first, "")


def _own(
    settings: dict[str, Any], name: str, parameters: dict[str, Any], tell: Callable[[str], None]
) -> dict[str, Any]:
    """The settings of one method's run: the common ones, without rounding where the method sends nothing to round."""
    method = make_method(name, {})
    for way, keys in ROUNDING.items():
        without = [key for key in keys if key in settings]
        if without and (why := unrounded(method, way)):
            tell(f"{short_name(name)}: {why}; it runs without {' and '.join(without)}")
            settings = {key: value for key, value in settings.items() if key not in without}
    if "bits" in settings and all(unrounded(method, way) for way in ROUNDING):
        tell(f"{short_name(name)}: {unrounded(method, 'uplink')}; it runs without bits")
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


def per_method(names: list[str], parameters: dict[str, Any], option: str = "--set") -> dict[str, dict[str, Any]]:
    """Parameters per method: METHOD.KEY for one, KEY for all that have it. Raises UserError if none has it, naming the
    command line's option."""
    own: dict[str, dict[str, Any]] = {name: {} for name in names}
    fields = {name: set(make_method(name, {}).parameters) for name in names}
    for key, value in parameters.items():
        name, dot, rest = key.rpartition(".")
        if dot and not any(name in (n, short_name(n)) for n in names):
            raise UserError(f"{option} {key}: {name!r} is not among the methods compared: {', '.join(names)}")
        takers = [n for n in names if (name in (n, short_name(n)) if dot else rest in fields[n])]
        if not takers:
            known = sorted(set.union(*fields.values()))
            raise UserError(f"{option} {key}: no method compared has a parameter {rest!r}{suggestion(rest, known)}")
        for taker in takers:
            own[taker][rest] = value
    return own


def _note_unequal_training(jobs: Sequence[PreparedRun], tuned: Collection[str], tell: Callable[[str], None]) -> None:
    """State which settings of local training differ between the compared methods, and are not tuned."""
    rounds = {job: job.experiment.run.rounds for job in jobs if job.method.own_rounds}
    given = {
        job.method.method_name: a_round(job.method.parameters, rounds[job]) if job in rounds else job.method.parameters
        for job in jobs
    }
    for key, values in unequal(given).items():
        if key in tuned:
            continue
        text = ", ".join(f"{value} ({listed(names, 3)})" for value, names in values)
        tell(f"{key} differs: {text} (--set {key}=VALUE makes it equal)")


def _quietly(text: str) -> None:
    """For what is stated elsewhere."""
