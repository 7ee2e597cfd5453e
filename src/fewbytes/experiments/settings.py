"""An experiment as a config file or the command line describes it."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from fewbytes.base.errors import UserError, suggestion
from fewbytes.base.files import check_own
from fewbytes.base.named import only_allowed
from fewbytes.base.ranges import wrong
from fewbytes.core.method import Method
from fewbytes.core.policy import Policy
from fewbytes.data import (
    Partition,
    client_folders,
    is_function,
)
from fewbytes.experiments.config_file import folded, read_experiment
from fewbytes.experiments.groups import GROUPS, KEYS, DataSettings, LearningSettings, ModelSettings
from fewbytes.methods import canonical, method_class
from fewbytes.methods.parts.clustered import Clustered
from fewbytes.methods.parts.secure import SecureAggregation
from fewbytes.models.hugging_face import PREFIX
from fewbytes.running.settings import Settings


@dataclass(frozen=True)
class Experiment:
    """A complete run: the method, its parameters and the groups of settings, with the keys of config.toml."""

    method: str
    parameters: dict[str, Any]
    data: DataSettings
    partition: Partition
    learning: LearningSettings
    model: ModelSettings
    run: Settings
    policy: Policy

    def settings(self) -> dict[str, Any]:
        """All settings by key, without those unset and brief ones at their default; with all parameters."""
        settings = {key: value for name in GROUPS for key, value in getattr(self, name).written().items()}
        return {"method": self.method, **settings, "parameters": self._parameters()}

    def run_config(self) -> dict[str, Any]:
        """`settings` as Flower's run config, which holds only plain values and tables of them."""
        settings = {key: value for name in GROUPS for key, value in getattr(self, name).in_text().items()}
        settings = {"method": self.method, **settings, "parameters": self._parameters()}
        return {key: value for key, value in settings.items() if value != {}}

    def _parameters(self) -> dict[str, Any]:
        return make_method(self.method, self.parameters).parameters

    def build_method(self) -> Method:
        """The method, wrapped in clusters or secure aggregation if requested. Raises UserError."""
        method, clusters = make_method(self.method, self.parameters), self.model.clusters
        if self.model.secure_aggregation:
            if clusters is not None:
                raise UserError(
                    "clusters are found from what each client sends about its data: leave secure_aggregation out"
                )
            if self.run.rounding:
                named = " and ".join(self.run.rounding)
                raise UserError(f"secure aggregation sums integers, which are not rounded: leave out {named}")
            return SecureAggregation(method, self.model.secure_range)
        if clusters is None:
            return method
        if "clusters" in method.parameters:
            raise UserError(f"{self.method} has its own clusters: use --set clusters={clusters}, not --clusters")
        return Clustered(method, clusters)

    def own_code(self) -> list[str]:
        """The classes and functions of the user's own, package.module:name."""
        models = [part.partition("@")[0] for part in (self.model.model or "").split("+")]
        named = [name for name in (self.method, *models) if ":" in name and "=" not in name]
        return [name for name in named if not name.startswith(("torchvision:", PREFIX))]

    def resuming(self, command: str) -> str:
        """The command that resumes a run: a run folder may import only code that --allow names."""
        modules = ",".join(dict.fromkeys(name.partition(":")[0] for name in self.own_code()))
        return f"{command} --allow {modules}" if modules else command

    def toml(self) -> str:
        """The text of config.toml."""
        return msgspec.toml.encode(self.settings()).decode()


TRY_EPOCHS = 40
"""Maximum number of local epochs, per round or in total, when only a method is given."""


def experiment_of(run: Path) -> Experiment:
    """The experiment of a run folder. Raises UserError for another folder, and a run made from Python."""
    if not (run / "config.toml").is_file():
        raise UserError(f"{run} is not a run folder: it has no config.toml")
    check_own(run)
    settings = read_experiment(run / "config.toml")
    if "dataset" not in settings:
        raise UserError(f"{run} was made from Python: it does not state where its data are")
    with only_allowed():
        return make_experiment(settings)


def make_experiment(settings: dict[str, Any]) -> Experiment:
    """Settings as an experiment, their types checked. Raises UserError naming the setting.

    Values with several parts may be text, like "500/100" (see `Text` in the declarations). If `client_data` is a
    folder, it determines `clients`.
    """
    settings = folded(dict(settings))
    for key in settings:
        if key not in KEYS:
            raise UserError(f"there is no setting {key!r}{suggestion(key, KEYS)}")
    if not isinstance(settings.get("method"), str):
        raise UserError("name a method (`fewbytes methods` lists them), or a config that does")
    settings["method"] = canonical(settings["method"])
    parameters = settings.get("parameters", {})
    place = settings.get("client_data")
    if isinstance(place, str) and "clients" not in settings:
        if is_function(place):
            raise UserError(f"client_data is a function, {place}: give the number of clients (clients)")
        settings["clients"] = len(client_folders(place))
    if not parameters and not settings.keys() & {"dataset", "client_data"}:
        parameters = _tried_out(settings["method"])
    groups: dict[str, Any] = {name: group.read(settings) for name, group in GROUPS.items()}
    experiment = Experiment(settings["method"], parameters, **groups)
    if experiment.partition.newcomers or experiment.partition.arrival is not None:
        return _scheduled(experiment)
    return experiment


def _tried_out(name: str) -> dict[str, Any]:
    """Parameters for a method when neither parameters nor data are given: changes to its defaults so that it runs in
    minutes."""
    method = make_method(name, {})
    usual = method.parameters
    quick = method.quick(min(usual.get("epochs", TRY_EPOCHS), TRY_EPOCHS)).parameters
    return {key: value for key, value in quick.items() if value != usual[key]}


def _scheduled(experiment: Experiment) -> Experiment:
    """The experiment with the round in which newcomers join. Raises UserError for an impossible round."""
    e, who = experiment, experiment.partition
    rounds = make_method(e.method, e.parameters).planned_rounds(e.run.rounds)
    if not who.newcomers:
        raise UserError("arrival is the round in which newcomers join: give their number (newcomers)")
    if rounds < 2:
        raise UserError(f"newcomers join after the first round, and {e.method} has only one here")
    arrival = e.run.rounds // 2 + 1 if who.arrival is None else who.arrival
    if not 2 <= arrival <= rounds:
        raise UserError(f"arrival must be a round from 2 to {rounds} here, not {arrival}")
    last = arrival + (who.newcomers - 1) // (who.newcomers_a_round or who.newcomers)
    if last > rounds:
        raise UserError(
            f"{who.newcomers} newcomers, {who.newcomers_a_round} per round from round {arrival}, would join until "
            f"round {last}, and the last round is {rounds}"
        )
    return dataclasses.replace(e, partition=dataclasses.replace(who, arrival=arrival))


def make_method(name: str, parameters: dict[str, Any]) -> Method:
    """A method by name with its parameters, given as values or as text. Raises UserError."""
    cls = method_class(name)
    return cls(**typed(name, cls.kinds(), parameters))


def typed(name: str, hints: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of `name`, given as values or as text, converted to their types. Raises UserError."""
    fields = list(hints)
    values = {}
    for key, value in parameters.items():
        if key not in fields:
            raise UserError(f"{name} has no parameter {key!r}{suggestion(key, fields)}; it has {', '.join(fields)}")
        if typing.get_origin(hints[key]) is Literal:
            values[key] = next(
                (c for c in typing.get_args(hints[key]) if str(c) == str(value)), value
            )  # other values are refused by the method
            continue
        try:
            values[key] = msgspec.convert(value, hints[key], strict=not isinstance(value, str))
        except msgspec.ValidationError as error:
            must = wrong(hints[key], value) or f"cannot be read ({error})"
            raise UserError(f"{name}: {key} {must}, not {value}") from None
    return values
