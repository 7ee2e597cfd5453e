"""Makes the task of an experiment from its data, and completes the settings that depend on the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError, listed, suggestion
from fewbytes.core.devices import check_device
from fewbytes.core.known_metrics import check_metrics_named
from fewbytes.core.objective import ClassWeights
from fewbytes.core.objectives import objective_for
from fewbytes.core.problem import Id
from fewbytes.core.task import Task
from fewbytes.data import AUGMENTATIONS, FederatedData, hold_out, with_transforms
from fewbytes.data.surveyed import OnTerms, SiteTerms
from fewbytes.experiments.groups import DECLARED, DataSettings, LearningSettings, ModelSettings
from fewbytes.experiments.loading import TOKENIZER, Loaded, load, place_of_client
from fewbytes.experiments.settings import Experiment
from fewbytes.experiments.surveying import TermsOf, survey_task
from fewbytes.models.adapters import Adapters
from fewbytes.models.build import ModelBuilder, check_models_named
from fewbytes.models.builders import convolutional
from fewbytes.models.hugging_face import PREFIX, check_tokenizer
from fewbytes.models.kgf import Kernels
from fewbytes.models.normalisation import Normalisation
from fewbytes.models.pretrained import Pretrained, check_fits, read_pretrained
from fewbytes.models.yolox import NAMES as DETECTORS
from fewbytes.running.run import Run
from fewbytes.running.watcher import Watcher


@dataclass(frozen=True)
class Found:
    """An experiment completed by its data (class names, columns, statistics of a normalisation, the model), its task,
    and findings while reading the data, one line each."""

    experiment: Experiment
    task: Task
    notes: tuple[str, ...] = ()

    def run(self, out: Path, resume: bool, watcher: Watcher, from_round: int | None = None) -> Run:
        """Its run in a folder. Raises UserError if it cannot run."""
        settings = dataclasses.replace(
            self.experiment.run, out=out, resume=resume, from_round=from_round, config=self.experiment.toml(),
            about=self.about(), watcher=watcher,
        )  # fmt: skip
        return Run.of(self.experiment.build_method(), self.task, settings, self.experiment.policy)

    def about(self) -> dict[str, Any]:
        """Entries of result.json about the task."""
        experiment, task, model = self.experiment, self.task, self.experiment.model
        settings = experiment.settings()
        named = {key: value for key, value in settings.items() if key in DECLARED and DECLARED[key].about.brief}
        drawn = model.kgf or str(model.model).startswith(PREFIX)  # alpha and beta; layers without weights
        named |= {"seed": model.seed} if drawn else {}
        pretrained = task.problem.pretrained
        named |= {} if pretrained is None else {"weights_digest": pretrained.digest}
        agreed = task.problem.agreed
        named |= {"tokenizer_digest": agreed[TOKENIZER]} if TOKENIZER in agreed else {}
        return named | {
            "dataset": _named_data(experiment.data),
            "model": model.model,
            "partition": experiment.partition.partition,
            "sample_shape": list(task.problem.sample_shape),
            "classes": len(task.data.classes),
            **({} if task.data.learns == "classes" else {"learns": task.data.learns}),
            **(_pools(task, experiment.partition.clients) if experiment.partition.newcomers else {}),
            **({"notes": list(self.notes)} if self.notes else {}),
        }


def _named_data(data: DataSettings) -> str:
    """The data set, or where the clients' data are if the server needs none of its own."""
    none = data.dataset == DECLARED["dataset"].default and (data.schema is not None or data.sample_shape is not None)
    return data.client_data or "the sites' own data" if none else data.dataset


def _pools(task: Task, known: int) -> dict[str, list[int]]:
    """The classes of the first `known` clients, and of the newcomers."""
    counts = task.data.label_counts()["train"]
    pools = {"known_classes": counts[:known], "newcomer_classes": counts[known:]}
    return {
        name: [c for c, counts in enumerate(zip(*rows, strict=True)) if any(counts)] for name, rows in pools.items()
    }


def find(experiment: Experiment, here: Sequence[Id] | None = None, terms: TermsOf | None = None) -> Found:
    """Load the data and make the task. Raises UserError.

    `here`: with a local partition, the clients whose data are on this machine: none on a server, one on a node; None:
    all, and the server's. `terms`: of a survey or an evaluation, what each site tells (default: all figures).
    """
    check_device(experiment.model.device)
    if experiment.build_method().promises.describes:
        return Found(experiment, survey_task(experiment, here, terms or (lambda client: SiteTerms())))
    pretrained = _checked(experiment.model, experiment.learning)
    loaded = clients_data(experiment, here)
    agreed = loaded.agreed
    data = with_transforms(loaded.federated, AUGMENTATIONS[loaded.data.augment], loaded.data.backdoor)
    model = dataclasses.replace(loaded.model, model=_model_name(experiment, data))
    experiment = dataclasses.replace(experiment, data=loaded.data, partition=loaded.partition, model=model)
    build = _builder(model, data)
    _check_samples(build, data, loaded)
    if build.normalisation is not None:
        agreed = {**agreed, "normalisation": str(build.normalisation)}
    if experiment.learning.positive is not None:
        agreed = {**agreed, "positive": experiment.learning.positive}
    task = _task(build, model, data, agreed, _objective(experiment.learning, data) | {"pretrained": pretrained})
    _check_models(build, task, experiment)
    method = experiment.build_method()
    task = method.promising(task, experiment.run.dp, method.planned_rounds(experiment.run.rounds))
    if method.promises.evaluates and terms is not None:
        task = _on_terms(task, loaded.data, here or (), terms)
    return Found(experiment, task, loaded.notes)


def _on_terms(task: Task, how: DataSettings, here: Sequence[Id], terms: TermsOf) -> Task:
    """The task with the sites' terms, by which figures about their test samples leave."""
    clients = list(task.data.clients)
    for i in here:
        test = OnTerms(clients[i].test, terms(i), place_of_client(how, i, len(clients), True), task.data.schema)
        clients[i] = dataclasses.replace(clients[i], test=test)
    return dataclasses.replace(task, data=dataclasses.replace(task.data, clients=tuple(clients)))


def _checked(model: ModelSettings, learning: LearningSettings) -> Pretrained | None:
    """The pretrained weights, if any. Raises UserError for names of models and metrics that there are not, before the
    data are loaded."""
    if model.kgf and model.lora:
        raise UserError("kgf generates the kernels that lora would freeze: leave one of them out")
    if model.model is not None:
        check_models_named(model.model)
    check_metrics_named(learning.metrics or (), learning.positive is not None)
    return None if model.weights is None else read_pretrained(model.weights)


def clients_data(experiment: Experiment, here: Sequence[Id] | None = None) -> Loaded:
    """The clients' data, with those held out for validation. `here`: as in `find`. Raises UserError."""
    loaded = load(experiment.data, experiment.partition, experiment.model, here)
    if not (share := experiment.learning.validation):
        return loaded
    if loaded.federated.learns == "boxes":
        raise UserError("detectors are scored on the server's test data alone: leave validation out")
    apart = experiment.partition.partition == "local"  # a server has none of the clients' data
    federated = hold_out(loaded.federated, share, experiment.model.seed, apart)
    return dataclasses.replace(loaded, federated=federated, agreed={**loaded.agreed, "validation": str(share)})


def _model_name(experiment: Experiment, data: FederatedData) -> str:
    """The given model, or the default for the method and the data."""
    shape = data.test.shape
    usual = experiment.build_method().model_for(shape)
    usual = convolutional(usual, shape) if experiment.model.kgf else usual
    return experiment.model.model or {"boxes": "yolox-s", "masks": "unet"}.get(data.learns, usual)


def _builder(model: ModelSettings, data: FederatedData) -> ModelBuilder:
    normalisation = _normalisation(model.normalise, data)
    kernels = Kernels(model.kgf, model.seed) if model.kgf else None
    return ModelBuilder(str(model.model), data.test.shape, len(data.classes), kernels, normalisation, data.learns)


def _normalisation(how: Normalisation | None, data: FederatedData) -> Normalisation | None:
    """The normalisation inside models, if any."""
    if how is None:
        return None
    if data.learns == "boxes":
        raise UserError("detectors take images without normalisation: leave normalise out")
    if not data.test.blank().is_floating_point():
        raise UserError("normalise is for floating-point samples, and samples here are integers: leave it out")
    return how.on(data.test.shape[0])


def _check_samples(build: ModelBuilder, data: FederatedData, loaded: Loaded) -> None:
    """Raises UserError for a transformer that does not take the samples."""
    for name in {name for name in build.names if name.startswith(PREFIX)}:
        if loaded.tokenizer is not None:
            check_tokenizer(name, loaded.tokenizer)
        elif len(build.shape) != 3 and data.test.blank().is_floating_point():
            raise UserError(f"{name} takes tokens or images, and {loaded.data.dataset} holds numbers: use mlp")


def _objective(learning: LearningSettings, data: FederatedData) -> dict[str, Any]:
    """The objective, if it is not the default for the data. Raises UserError."""
    metrics, weights, positive = learning.metrics, learning.class_weights, learning.positive
    if metrics is None and weights is None and positive is None:
        return {}
    if data.learns == "boxes":
        raise UserError("detectors have their own loss and COCO's metrics: leave metrics and class_weights out")
    given: ClassWeights | None = None if weights is None else weights.each or "balanced"
    if positive is not None and data.learns != "classes":
        raise UserError(
            f"positive names one of several classes, and the targets here are {data.learns}: leave it out, or have "
            "another column predicted (target)"
        )
    if positive is not None and positive not in data.classes:
        raise UserError(
            f"positive: there is no class {positive!r}{suggestion(positive, data.classes)}; there are "
            f"{listed(data.classes)}"
        )
    number = None if positive is None else data.classes.index(positive)
    return {"objective": objective_for(data.learns, metrics, None, given, len(data.classes), number)}


def _task(
    build: ModelBuilder,
    model: ModelSettings,
    data: FederatedData,
    agreed: Mapping[str, str],
    more: Mapping[str, Any],
) -> Task:
    """The task, after checking that its models can be built. Raises UserError."""
    splits = [data.test, *(client.train for client in data.clients)]
    task = Task.on(
        data,
        build,
        **more,
        **({} if any(map(len, splits)) else {"sample": data.test.blank()}),  # a server without a table of its own
        agreed=agreed,
        seed=model.seed,
        precision=model.precision,
        device=model.device,
        recalibrate=model.recalibrate,
        lora=None if model.lora is None else Adapters(model.lora),
    )
    try:
        for client in range(min(len(data.clients), len(build.names))):
            task.problem.layout(client)  # refuse a wrong model before anything is written
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"the model {model.model} cannot be used: {' '.join(str(error).split())}") from None
    return task


def _check_models(build: ModelBuilder, task: Task, experiment: Experiment) -> None:
    """Raises UserError for models that do not suit the data, and weights that do not fit the models."""
    detects, name, dataset = build.learns == "boxes", experiment.model.model, experiment.data.dataset
    if detects and not all(hasattr(task.problem.on_cpu().model(i), "loss") for i in range(len(build.names))):
        raise UserError(f"{dataset} is for object detection: use a detector, such as yolox-s, not {name}")
    if task.problem.pretrained is not None:
        bare = dataclasses.replace(task.problem, lora=None)
        check_fits(task.problem.pretrained, [bare.model(i) for i in bare.architectures()])
    if not detects and set(build.names) & set(DETECTORS):
        raise UserError(f"{name} is an object detector, and {dataset} has no boxes: use another model")
