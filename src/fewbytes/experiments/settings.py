"""An experiment as a config file or the command line describes it, and what it makes: a method and a task."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from fewbytes.base.errors import UserError, suggestion
from fewbytes.base.units import parse_bytes
from fewbytes.core.method import Method
from fewbytes.core.policy import Policy
from fewbytes.core.problem import Id, Task
from fewbytes.core.ranges import Count, Share, Whole
from fewbytes.data import (
    Dataset,
    FederatedData,
    client_folders,
    crop_flip,
    federate,
    federate_local,
    load_dataset,
    with_public,
    with_transforms,
)
from fewbytes.methods import METHODS
from fewbytes.models import default_model
from fewbytes.models.build import ModelBuilder
from fewbytes.models.kgf import Kernels
from fewbytes.models.yolox import NAMES as DETECTORS
from fewbytes.running.loop import Settings, Watcher

UNSAID: dict[str, Any] = {
    "image_size": None, "part": 1.0, "augment": "none", "backdoor": 0, "kgf": None, "main_share": 0.8,
    "newcomers": 0, "arrival": None, "stay": False, "known_classes": None, "newcomer_classes": None, "budget": None,
    "client_data": None, "class_names": None,
}  # fmt: skip
"""Settings that config.toml and result.json name only where they differ from these."""


class Experiment(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Every setting of a run, with its default; the keys of config.toml and the options of the command line."""

    method: str
    dataset: str = "digits"
    image_size: Count | None = UNSAID["image_size"]  # pixels a side of images (see load_dataset)
    part: Share = UNSAID["part"]  # of the data set that is used, drawn by the seed
    partition: str = "dirichlet"  # "local": nothing is dealt out, each client has a data set of its own
    client_data: str | None = UNSAID["client_data"]  # local: a folder with one for each client; None: `dataset`'s name
    class_names: list[str] | None = UNSAID["class_names"]  # local: in label order; None: those of the server's data set
    alpha: float = 0.5
    classes_per_client: Count = 2
    shards_per_client: Count = 2
    main_share: float = UNSAID["main_share"]  # part of a client's samples that is of its main classes
    samples: tuple[Count, Count] | None = None  # fixed training and test samples per client
    partition_options: dict[str, Any] = {}
    public: str | Count | None = None  # the server's public samples: another data set, or so many held out
    clients: Count = 10
    newcomers: Whole = UNSAID["newcomers"]  # further clients, with classes of their own
    arrival: Count | None = UNSAID["arrival"]  # the round they come in; None: the first of the run's second half
    stay: bool = UNSAID["stay"]  # whether the others go on then; else they leave
    known_classes: list[int] | None = UNSAID["known_classes"]  # of the others; None: half of them, drawn
    newcomer_classes: list[int] | None = UNSAID["newcomer_classes"]
    augment: Literal["none", "crop-flip"] = UNSAID["augment"]
    backdoor: int = UNSAID["backdoor"]  # the first so many clients stamp a shape on every training image
    model: str | None = None  # None: chosen by the data set's shape
    kgf: Count | None = UNSAID["kgf"]  # base kernels of a convolution, from which the others are generated (Fed-KGF)
    rounds: Count = 20
    budget: Count | None = UNSAID["budget"]  # most uplink bytes of the whole run, all clients together
    seed: int = 0
    precision: Literal["float32", "bf16"] = "float32"
    device: str = "cpu"
    engine: Literal["local", "flower-simulation", "flower-deployment"] = "local"
    workers: Count | None = None  # None: one per core
    evaluate_every: Count = 1
    coding: bool = True
    keep_frames: bool = False
    save_models: bool = True
    min_replies: float = Policy.min_replies
    round_timeout: float = Policy.round_timeout  # of the engines on Flower, with the two below
    over_selection: float = Policy.over_selection
    connect_timeout: float = Policy.connect_timeout
    parameters: dict[str, Any] = {}  # the method's own fields

    def settings(self) -> dict[str, Any]:
        """Every setting that has a value, but for those of UNSAID; the method's parameters with their defaults."""
        settings = {k: v for k, v in msgspec.to_builtins(self).items() if v != UNSAID.get(k)}
        settings["parameters"] = make_method(self.method, self.parameters).parameters
        return settings

    def toml(self) -> str:
        """The text of config.toml."""
        return msgspec.toml.encode(self.settings()).decode()

    def policy(self) -> Policy:
        """Whom a run on Flower waits for, and how long."""
        return Policy(self.min_replies, self.round_timeout, self.over_selection, self.connect_timeout)

    def run_settings(self, task: Task, out: Path, resume: bool, watcher: Watcher) -> Settings:
        """The experiment as what the run's loop takes."""
        return Settings(
            self.rounds, out, resume, self.coding, self.evaluate_every, self.keep_frames, self.save_models,
            self.toml(), self.about(task), watcher, self.budget,
        )  # fmt: skip

    def task(self, here: Sequence[Id] | None = None) -> Task:
        """The task: data loaded and dealt out, the model ready to be built. Raises UserError.

        `here`: the clients whose own data are on this machine, where the partition is local: none on a server, one on
        its node; None stands for all, and the server's.
        """
        check_device(self.device)
        data, agreed = self._dealt() if self.partition != "local" else self._local(here)
        detects = data.test.boxes is not None
        data = with_transforms(data, {"none": None, "crop-flip": crop_flip}[self.augment], self.backdoor)
        shape, classes = data.test.shape, len(data.classes)
        name = self.model = self.model or ("yolox-s" if detects else default_model(shape))
        build = ModelBuilder(name, shape, classes, Kernels(self.kgf, self.seed) if self.kgf else None)
        task = Task.on(data, build, seed=self.seed, precision=self.precision, device=self.device, agreed=agreed)
        try:
            for client in range(min(len(data.clients), len(build.names))):
                task.problem.layout(client)  # so that a wrong model is told before anything is written
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"the model {name} cannot be used: {' '.join(str(error).split())}") from None
        if detects and not all(hasattr(task.problem.model(i), "loss") for i in range(len(build.names))):
            raise UserError(f"{self.dataset} holds objects to be found: take a detector, such as yolox-s, not {name}")
        if not detects and set(build.names) & set(DETECTORS):
            raise UserError(f"{name} finds objects, and {self.dataset} has no boxes of any: take another model")
        return task

    def _dealt(self) -> tuple[FederatedData, Mapping[str, str]]:
        """The data set dealt out, and what servers and nodes, who all do so, must agree on."""
        if self.client_data is not None or self.class_names is not None:
            raise UserError("client_data and class_names are for clients with data of their own: set partition local")
        dataset, public = self._part(load_dataset(self.dataset, self.image_size)), None
        agreed = {"data set (dealt out; --partition local leaves each node its own)": _words(dataset)}
        if self.public is not None:
            dataset, public = with_public(dataset, str(self.public), self.seed, self.image_size)
        data = federate(
            dataset, self.partition, self.clients, alpha=self.alpha, classes_per_client=self.classes_per_client,
            shards_per_client=self.shards_per_client, main_share=self.main_share, samples=self.samples, seed=self.seed,
            options=self.partition_options, newcomers=self.newcomers, arrival=self.arrival or 2, stay=self.stay,
            known_classes=self.known_classes, newcomer_classes=self.newcomer_classes,
        )  # fmt: skip
        return dataclasses.replace(data, public=public), agreed

    def _local(self, here: Sequence[Id] | None) -> tuple[FederatedData, Mapping[str, str]]:
        """Each client's own data set, as far as it is here, and what servers and nodes must agree on."""
        for key in ("samples", "partition_options", "newcomers"):
            if getattr(self, key):
                raise UserError(f"{key} says how a data set is dealt out, and partition local deals none: leave it out")
        if str(self.public or "").isdecimal():
            raise UserError("partition local holds nothing out: name a data set of the server's for public")
        mine = {
            client: self._part(load_dataset(self._place(client, alone=here is not None), self.image_size))
            for client in (range(self.clients) if here is None else here)
        }
        like = mine[here[0]] if here else self._part(self._servers())  # who says what classes there are
        self.class_names = list(like.classes) if self.class_names is None else self.class_names
        test = like.test.take([]) if here else like.numbered(self.class_names).test
        data = federate_local([mine.get(i) for i in range(self.clients)], test, self.class_names)
        if self.public is not None and not here:
            data = dataclasses.replace(data, public=with_public(like, str(self.public), self.seed, self.image_size)[1])
        return data, {"classes": json.dumps(self.class_names), "shape of a sample": str(test.shape)}

    def _part(self, dataset: Dataset) -> Dataset:
        return dataset.part(self.part, self.seed) if self.part < 1 else dataset

    def _place(self, client: Id, alone: bool) -> str:
        """The name or folder of a client's own data set; `alone`: other clients' are elsewhere."""
        if self.client_data is None and alone:
            return self.dataset
        if self.client_data is None:
            raise UserError("with partition local, client_data names a folder that holds one for each client")
        folders = client_folders(self.client_data)
        if alone and len(folders) == 1:
            return str(folders[0])
        if len(folders) != self.clients:
            raise UserError(f"client_data: {self.client_data} holds data of {len(folders)} clients, not {self.clients}")
        return str(folders[client])

    def _servers(self) -> Dataset:
        """The server's own data set, of which only the test samples are used."""
        try:
            return load_dataset(self.dataset, self.image_size, only_test=True)
        except UserError as error:
            raise UserError(
                f"{error}; with partition local the dataset is the server's, and has a test set, if only of an image "
                "of each class"
            ) from None

    def about(self, task: Task) -> dict[str, Any]:
        """What result.json says of the task."""
        shape = task.problem.sample_shape
        said = {key: getattr(self, key) for key, unsaid in UNSAID.items() if getattr(self, key) != unsaid}
        said |= {"seed": self.seed} if self.kgf else {}  # which alpha and beta come from
        return said | {
            "dataset": self.dataset, "model": self.model, "partition": self.partition,
            "sample_shape": list(shape), "classes": len(task.data.classes),
            **(self._pools(task) if self.newcomers else {}),
        }  # fmt: skip

    def _pools(self, task: Task) -> dict[str, list[int]]:
        """The classes that known clients and newcomers hold samples of."""
        counts = task.data.label_counts()["train"]
        pools = {"known_classes": counts[: self.clients], "newcomer_classes": counts[self.clients :]}
        return {
            name: [c for c, held in enumerate(zip(*rows, strict=True)) if any(held)] for name, rows in pools.items()
        }


def _words(dataset: Dataset) -> str:
    """A data set in words that differ for others' labels."""
    digest = hashlib.sha256("\n".join(dataset.classes).encode())
    for split in (dataset.train, dataset.test):
        digest.update(split.labels.numpy().tobytes())
    sizes = f"{len(dataset.train)} training and {len(dataset.test)} test samples of {len(dataset.classes)} classes"
    return f"{sizes}, labels {digest.hexdigest()[:8]}"


CLASS_LISTS = ("known_classes", "newcomer_classes")
"""Settings that may be text with commas."""
SETTINGS = (*(f.name for f in msgspec.structs.fields(Experiment)), "fraction")


def read_experiment(path: Path) -> dict[str, Any]:
    """The settings in a TOML file. Raises UserError if it cannot be read or names a setting that does not exist."""
    try:
        settings = msgspec.toml.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise UserError(f"the config {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"the config {path} is not valid TOML: {error}") from None
    for key in settings:
        if key not in SETTINGS:
            raise UserError(f"the config {path} has an unknown key {key!r}{suggestion(key, SETTINGS)}")
    return settings


def experiment_of(run: Path) -> Experiment:
    """The experiment of a run folder. Raises UserError if it is none, or was made from Python."""
    if not (run / "config.toml").is_file():
        raise UserError(f"{run} is not a run folder: it has no config.toml")
    settings = read_experiment(run / "config.toml")
    if "dataset" not in settings:
        raise UserError(f"{run} was made from Python: where its data are is not known")
    return make_experiment(settings)


def make_experiment(settings: dict[str, Any]) -> Experiment:
    """Settings as an experiment, their types checked. Raises UserError naming the setting.

    `samples` may be text like "500/100", lists of classes like "0,1,2", `budget` like "200MB", `class_names` a list in
    JSON; `fraction` stands for the method's parameter of that name. `clients` follows from `client_data`.
    """
    settings = dict(settings)
    if not isinstance(settings.get("parameters", {}), dict):
        raise UserError("parameters is a table of the method's own fields")
    if "fraction" in settings:
        settings["parameters"] = settings.get("parameters", {}) | {"fraction": settings.pop("fraction")}
    if isinstance(settings.get("samples"), str):
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", settings["samples"])
        if match is None:
            raise UserError(f"samples is training/test samples per client, like 500/100, not {settings['samples']!r}")
        settings["samples"] = [int(match[1]), int(match[2])]
    if isinstance(settings.get("budget"), str | float):
        settings["budget"] = parse_bytes(settings["budget"])
    if isinstance(settings.get("class_names"), str):
        try:
            settings["class_names"] = msgspec.json.decode(settings["class_names"])
        except msgspec.DecodeError:
            raise UserError(f"class_names is a list, not {settings['class_names']!r}") from None
    if isinstance(settings.get("client_data"), str) and "clients" not in settings:
        settings["clients"] = len(client_folders(settings["client_data"]))
    for key in CLASS_LISTS:
        if isinstance(text := settings.get(key), str):
            names = [name.strip() for name in text.split(",")]
            if not all(re.fullmatch("[0-9]+", name) for name in names):
                raise UserError(f"{key} is a list of class numbers, like 0,1,2, not {text!r}")
            settings[key] = [int(name) for name in names]
    for key, kind in typing.get_type_hints(Experiment).items():
        if typing.get_origin(kind) is Literal and settings.get(key, kind.__args__[0]) not in kind.__args__:
            raise UserError(f"{key} is one of {', '.join(kind.__args__)}, not {settings[key]!r}")
    try:
        experiment = msgspec.convert(settings, Experiment)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        raise UserError(f"{where.rstrip('`') or 'settings'}: {what[:1].lower()}{what[1:]}") from None
    if experiment.newcomers or experiment.arrival is not None:
        _schedule(experiment)
    return experiment


def _schedule(experiment: Experiment) -> None:
    """Fill in when newcomers come. Raises UserError for a round they cannot come in."""
    e = experiment
    rounds = make_method(e.method, e.parameters).planned_rounds(e.rounds)
    if not e.newcomers:
        raise UserError("arrival is the round newcomers come in: say how many there are (newcomers)")
    if rounds < 2:
        raise UserError(f"newcomers come after the first round, and {e.method} has no other here")
    e.arrival = e.rounds // 2 + 1 if e.arrival is None else e.arrival
    if not 2 <= e.arrival <= rounds:
        raise UserError(f"arrival is one of the rounds 2 to {rounds} here, not {e.arrival}")


def make_method(name: str, parameters: dict[str, Any]) -> Method:
    """A method by name with its own parameters, given as values or as text. Raises UserError."""
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}{suggestion(name, METHODS)}; `fewbytes methods` lists them")
    cls = METHODS[name]
    hints = cls.kinds()
    fields = list(hints)
    values = {}
    for key, value in parameters.items():
        if key not in fields:
            raise UserError(f"{name} has no parameter {key!r}{suggestion(key, fields)}; it has {', '.join(fields)}")
        if typing.get_origin(hints[key]) is Literal:
            values[key] = next((c for c in typing.get_args(hints[key]) if str(c) == str(value)), value)  # else it tells
            continue
        try:
            values[key] = msgspec.convert(value, hints[key], strict=not isinstance(value, str))
        except msgspec.ValidationError as error:
            why = "expected true or false" if hints[key] is bool else str(error)
            raise UserError(f"{name}: parameter {key}={value}: {why}") from None
    return cls(**values)


def check_device(device: str) -> None:
    """Raises UserError for a device this machine does not have."""
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"device {device!r} is neither cpu nor cuda")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
