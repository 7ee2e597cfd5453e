"""An experiment as a config file or the command line describes it, and what it makes: a method and a task."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from fewbytes.base.errors import UserError, suggestion
from fewbytes.base.files import check_own
from fewbytes.base.named import only_allowed
from fewbytes.base.ranges import wrong
from fewbytes.core.devices import check_device
from fewbytes.core.method import Method
from fewbytes.core.objective import Objective, Weights, objective_for
from fewbytes.core.policy import Policy
from fewbytes.core.problem import Id, Task
from fewbytes.data import (
    AUGMENTATIONS,
    FederatedData,
    Partition,
    client_folders,
    is_function,
    with_transforms,
)
from fewbytes.experiments.groups import DECLARED, GROUPS, KEYS, DataSettings, LearningSettings, ModelSettings
from fewbytes.experiments.loading import TOKENIZER, Loading
from fewbytes.methods import method_class
from fewbytes.methods.parts.clustered import Clustered
from fewbytes.methods.parts.secure import SecureAggregation
from fewbytes.models.build import ModelBuilder
from fewbytes.models.builders import convolutional
from fewbytes.models.hugging_face import PREFIX, check_tokenizer
from fewbytes.models.kgf import Kernels
from fewbytes.models.normalisation import Normalisation
from fewbytes.models.pretrained import check_fits, read_pretrained
from fewbytes.models.yolox import NAMES as DETECTORS
from fewbytes.running.settings import Settings
from fewbytes.running.watcher import Watcher


@dataclass
class Experiment:
    """All that makes a run: the method, its parameters and the groups of settings, whose keys are config.toml's."""

    method: str
    parameters: dict[str, Any]
    data: DataSettings
    partition: Partition
    learning: LearningSettings
    model: ModelSettings
    run: Settings
    policy: Policy
    notes: tuple[str, ...] = dataclasses.field(default=(), init=False, compare=False)
    """What was found as its data were read, once `task` has read them."""

    def settings(self) -> dict[str, Any]:
        """By key every setting that has a value, but for brief ones at their default; parameters with theirs."""
        settings = {key: value for name in GROUPS for key, value in getattr(self, name).written().items()}
        return {"method": self.method, **settings, "parameters": self._parameters()}

    def run_config(self) -> dict[str, Any]:
        """`settings` as Flower's run config, which knows only plain values and tables of them."""
        settings = {key: value for name in GROUPS for key, value in getattr(self, name).in_text().items()}
        settings = {"method": self.method, **settings, "parameters": self._parameters()}
        return {key: value for key, value in settings.items() if value != {}}

    def _parameters(self) -> dict[str, Any]:
        return make_method(self.method, self.parameters).parameters

    def made(self) -> Method:
        """The method, in clusters or with secure aggregation if it is to be. Raises UserError."""
        method, clusters = make_method(self.method, self.parameters), self.model.clusters
        if self.model.secure_aggregation:
            if clusters is not None:
                raise UserError(
                    "clusters are found by what each client tells of its data: leave secure_aggregation out"
                )
            if self.run.rounding:
                named = " and ".join(self.run.rounding)
                raise UserError(f"secure aggregation sums whole numbers, of which none is rounded: leave out {named}")
            return SecureAggregation(method, self.model.secure_range)
        if clusters is None:
            return method
        if "clusters" in method.parameters:
            raise UserError(f"{self.method} has clusters of its own: --set clusters={clusters}, not --clusters")
        return Clustered(method, clusters)

    def own_code(self) -> list[str]:
        """The classes and functions that the user has named, package.module:name."""
        models = [part.partition("@")[0] for part in (self.model.model or "").split("+")]
        named = [name for name in (self.method, *models) if ":" in name and "=" not in name]
        return [name for name in named if not name.startswith(("torchvision:", PREFIX))]

    def resuming(self, command: str) -> str:
        """The command that goes on with a run of it: a file does not name code that is not allowed."""
        modules = ",".join(dict.fromkeys(name.partition(":")[0] for name in self.own_code()))
        return f"{command} --allow {modules}" if modules else command

    def toml(self) -> str:
        """The text of config.toml."""
        return msgspec.toml.encode(self.settings()).decode()

    def run_settings(
        self, task: Task, out: Path, resume: bool, watcher: Watcher, from_round: int | None = None
    ) -> Settings:
        """What the run's loop takes, for a run folder."""
        return dataclasses.replace(
            self.run, out=out, resume=resume, from_round=from_round, config=self.toml(), about=self.about(task),
            watcher=watcher,
        )  # fmt: skip

    def task(self, here: Sequence[Id] | None = None) -> Task:
        """The task: data loaded and dealt out, the model ready to be built. Raises UserError.

        `here`: the clients whose own data are on this machine, where the partition is local: none on a server, one on
        its node; None stands for all, and the server's.
        """
        check_device(self.model.device)
        loading = Loading(self.data, self.partition, self.model)
        data, agreed = loading.federated(here)
        self.data, self.model, self.notes = loading.data, loading.model, tuple(loading.notes)
        detects = data.learns == "boxes"
        data = with_transforms(data, AUGMENTATIONS[self.data.augment], self.data.backdoor)
        shape, classes = data.test.shape, len(data.classes)
        usual = self.made().model_for(shape)
        usual = convolutional(usual, shape) if self.model.kgf else usual
        name = self.model.model or {"boxes": "yolox-s", "masks": "unet"}.get(data.learns, usual)
        model = self.model = dataclasses.replace(self.model, model=name)
        if model.kgf and model.lora:
            raise UserError("kgf generates the kernels that lora would leave as they are: leave one of them out")
        normalisation = self._normalisation(data)
        agreed = {**agreed, **({} if normalisation is None else {"normalisation": str(normalisation)})}
        kernels = Kernels(model.kgf, model.seed) if model.kgf else None
        build = ModelBuilder(name, shape, classes, kernels, normalisation, data.learns)
        for each in {each for each in build.names if each.startswith(PREFIX)}:
            if loading.cut is not None:
                check_tokenizer(each, loading.cut)
            elif len(shape) != 3 and data.test.blank().is_floating_point():
                raise UserError(f"{each} takes tokens or images, and {self.data.dataset} holds numbers: take mlp")
        how = {
            "seed": model.seed,
            "precision": model.precision,
            "device": model.device,
            "recalibrate": model.recalibrate,
            "pretrained": None if model.weights is None else read_pretrained(model.weights),
            "lora": model.lora,
        }
        task = Task.on(data, build, **self._objective(data), agreed=agreed, **how)
        try:
            for client in range(min(len(data.clients), len(build.names))):
                task.problem.layout(client)  # so that a wrong model is refused before anything is written
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"the model {name} cannot be used: {' '.join(str(error).split())}") from None
        if detects and not all(hasattr(task.problem.on_cpu().model(i), "loss") for i in range(len(build.names))):
            raise UserError(
                f"{self.data.dataset} holds objects to be found: take a detector, such as yolox-s, not {name}"
            )
        if task.problem.pretrained is not None:
            bare = dataclasses.replace(task.problem, lora=None)
            check_fits(task.problem.pretrained, [bare.model(i) for i in bare.architectures()])
        if not detects and set(build.names) & set(DETECTORS):
            raise UserError(f"{name} finds objects, and {self.data.dataset} has no boxes of any: take another model")
        method = self.made()
        return method.promising(task, self.run.dp, method.planned_rounds(self.run.rounds))

    def _objective(self, data: FederatedData) -> dict[str, Objective]:
        """What is learnt of the data, where it is not the usual. Raises UserError."""
        metrics, weights = self.learning.metrics, self.learning.class_weights
        if metrics is None and weights is None:
            return {}
        if data.learns == "boxes":
            raise UserError(
                "objects are found by a detector's own loss, and scored as COCO does: leave the metrics out"
            )
        given: Weights | None = None if weights is None else weights.each or "balanced"
        return {"objective": objective_for(data.learns, metrics, None, given, len(data.classes))}

    def _normalisation(self, data: FederatedData) -> Normalisation | None:
        """How models normalise samples, if they do."""
        how = self.model.normalise
        if how is None:
            return None
        if data.learns == "boxes":
            raise UserError("detectors take images as they are: leave normalise out")
        if not data.test.blank().is_floating_point():
            raise UserError("normalise is for images and other numbers, and samples here are whole numbers")
        return how.on(data.test.shape[0])

    def about(self, task: Task) -> dict[str, Any]:
        """What result.json says of the task."""
        named = {key: value for key, value in self.settings().items() if key in DECLARED and DECLARED[key].about.brief}
        drawn = self.model.kgf or str(self.model.model).startswith(PREFIX)  # alpha and beta; parts that have no weights
        named |= {"seed": self.model.seed} if drawn else {}
        pretrained = task.problem.pretrained
        named |= {} if pretrained is None else {"weights_digest": pretrained.digest}
        agreed = task.problem.agreed
        named |= {"tokenizer_digest": agreed[TOKENIZER]} if TOKENIZER in agreed else {}
        return named | {
            "dataset": self.data.dataset,
            "model": self.model.model,
            "partition": self.partition.partition,
            "sample_shape": list(task.problem.sample_shape),
            "classes": len(task.data.classes),
            **({} if task.data.learns == "classes" else {"learns": task.data.learns}),
            **(self._pools(task) if self.partition.newcomers else {}),
            **({"notes": list(self.notes)} if self.notes else {}),
        }

    def _pools(self, task: Task) -> dict[str, list[int]]:
        """The classes that known clients and newcomers hold samples of."""
        counts = task.data.label_counts()["train"]
        known = self.partition.clients
        pools = {"known_classes": counts[:known], "newcomer_classes": counts[known:]}
        return {
            name: [c for c, held in enumerate(zip(*rows, strict=True)) if any(held)] for name, rows in pools.items()
        }


TRY_EPOCHS = 40
"""The most local epochs, a round or in all, of a method that is only named."""


def read_experiment(path: Path) -> dict[str, Any]:
    """The settings in a TOML file. Raises UserError if it cannot be read or names a setting that does not exist."""
    try:
        settings = msgspec.toml.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise UserError(f"the config {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"the config {path} is not valid TOML: {error}") from None
    for key in settings:
        if key not in KEYS:
            raise UserError(f"the config {path} has an unknown key {key!r}{suggestion(key, KEYS)}")
    return folded(settings)


def folded(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with `fraction` among the parameters. Raises UserError if it is named in both places."""
    parameters = settings.get("parameters", {})
    if not isinstance(parameters, dict):
        raise UserError("parameters is a table of the method's own fields")
    if "fraction" not in settings:
        return settings
    if "fraction" in parameters:
        both = f"{settings['fraction']} and, as a parameter, {parameters['fraction']}"
        raise UserError(f"fraction is named twice, {both}: name it once")
    others = {key: value for key, value in settings.items() if key != "fraction"}
    return others | {"parameters": {"fraction": settings["fraction"], **parameters}}


def experiment_of(run: Path) -> Experiment:
    """The experiment of a run folder. Raises UserError if it is none, or was made from Python."""
    if not (run / "config.toml").is_file():
        raise UserError(f"{run} is not a run folder: it has no config.toml")
    check_own(run)
    settings = read_experiment(run / "config.toml")
    if "dataset" not in settings:
        raise UserError(f"{run} was made from Python: where its data are is not known")
    with only_allowed():
        return make_experiment(settings)


def make_experiment(settings: dict[str, Any]) -> Experiment:
    """Settings as an experiment, their types checked. Raises UserError naming the setting.

    What has several parts may be text, like "500/100" (see `Text` in the declarations). `clients` follows from
    `client_data`, where that is a folder.
    """
    settings = folded(dict(settings))
    for key in settings:
        if key not in KEYS:
            raise UserError(f"there is no setting {key!r}{suggestion(key, KEYS)}")
    if not isinstance(settings.get("method"), str):
        raise UserError("name a method (`fewbytes methods` lists them), or a config that does")
    parameters = settings.get("parameters", {})
    place = settings.get("client_data")
    if isinstance(place, str) and "clients" not in settings:
        if is_function(place):
            raise UserError(f"client_data is a function, {place}: say how many clients there are (clients)")
        settings["clients"] = len(client_folders(place))
    if not parameters and not settings.keys() & {"dataset", "client_data"}:
        parameters = _tried_out(settings["method"])
    groups: dict[str, Any] = {name: group.read(settings) for name, group in GROUPS.items()}
    experiment = Experiment(settings["method"], parameters, **groups)
    if experiment.partition.newcomers or experiment.partition.arrival is not None:
        _schedule(experiment)
    return experiment


def _tried_out(name: str) -> dict[str, Any]:
    """The parameters of a method of which nothing is said, on data of which nothing is said: what differs from its
    defaults for it to run in minutes."""
    method = make_method(name, {})
    usual = method.parameters
    quick = method.quick(min(usual.get("epochs", TRY_EPOCHS), TRY_EPOCHS)).parameters
    return {key: value for key, value in quick.items() if value != usual[key]}


def _schedule(experiment: Experiment) -> None:
    """Fill in when newcomers come. Raises UserError for a round they cannot come in."""
    e, who = experiment, experiment.partition
    rounds = make_method(e.method, e.parameters).planned_rounds(e.run.rounds)
    if not who.newcomers:
        raise UserError("arrival is the round newcomers come in: say how many there are (newcomers)")
    if rounds < 2:
        raise UserError(f"newcomers come after the first round, and {e.method} has no other here")
    arrival = e.run.rounds // 2 + 1 if who.arrival is None else who.arrival
    if not 2 <= arrival <= rounds:
        raise UserError(f"arrival is one of the rounds 2 to {rounds} here, not {arrival}")
    last = arrival + (who.newcomers - 1) // (who.newcomers_a_round or who.newcomers)
    if last > rounds:
        raise UserError(
            f"the last of {who.newcomers} newcomers, {who.newcomers_a_round} a round from round {arrival} on, come in "
            f"round {last}, after the last, {rounds}"
        )
    e.partition = dataclasses.replace(who, arrival=arrival)


def make_method(name: str, parameters: dict[str, Any]) -> Method:
    """A method by name with its own parameters, given as values or as text. Raises UserError."""
    cls = method_class(name)
    return cls(**typed(name, cls.kinds(), parameters))


def typed(name: str, hints: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of what is called `name`, given as values or as text, by the types of all it has. Raises UserError."""
    fields = list(hints)
    values = {}
    for key, value in parameters.items():
        if key not in fields:
            raise UserError(f"{name} has no parameter {key!r}{suggestion(key, fields)}; it has {', '.join(fields)}")
        if typing.get_origin(hints[key]) is Literal:
            values[key] = next(
                (c for c in typing.get_args(hints[key]) if str(c) == str(value)), value
            )  # else the method refuses it
            continue
        try:
            values[key] = msgspec.convert(value, hints[key], strict=not isinstance(value, str))
        except msgspec.ValidationError as error:
            must = wrong(hints[key], value) or f"cannot be read ({error})"
            raise UserError(f"{name}: {key} {must}, not {value}") from None
    return values
