"""What models learn: the loss, how samples come, what is scored, how predictions are shown."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.errors import UserError, named, one_line
from fewbytes.base.state import in_training
from fewbytes.core.devices import Precision, arithmetic
from fewbytes.core.metrics import (
    KNOWN,
    Measure,
    Metric,
    Scores,
    known_metric,
    metrics_of,
    value_of,
    values,
)
from fewbytes.core.outputs import takes_whole
from fewbytes.core.training import EVALUATION_BATCH, Loss, own_loss, ready
from fewbytes.data.named import NamedTensors
from fewbytes.data.split import IGNORED_PIXEL, IGNORED_TOKEN, Items, Kind, LazySamples, Split

Weights = tuple[float, ...] | Literal["balanced"]
"""Of classes in a loss: one each, or the inverse of how often a client has them."""
Show = Callable[[str, Any], None]
"""`Network.show`."""


@dataclass(frozen=True)
class Objective(ABC):
    """What models learn of samples and their targets.

    `metrics`: what tells how good predictions are; the first is what tables call the score. `criterion`: a loss of
    one's own, (outputs, targets) to the mean of a batch.
    """

    metrics: tuple[Metric, ...] = ()
    criterion: Loss | None = field(default=None, compare=False, repr=False)

    suits: ClassVar[str]
    """Which models and methods can learn it, in words for who took another."""

    def loss(self, model: nn.Module, given: Loss | None, targets: Tensor) -> Loss:
        """What the model is trained with on data of these targets: what a method gives, the criterion, the model's own,
        a method `loss(outputs, targets)`, or the usual. Raises UserError if it cannot learn this."""
        if given is not None and self.criterion is not None:
            raise UserError(
                "the method trains by a loss of its own, which would take the place of yours: leave yours out"
            )
        return given or self.criterion or own_loss(model) or self.usual(targets)

    @property
    def whole(self) -> bool:
        """Whether the criterion takes the whole output of a model."""
        return takes_whole(self.criterion)

    @property
    def any_scale(self) -> bool:
        """Whether targets may be of any scale, and with them the parameters of a model: also where the loss is one's
        own."""
        return self.criterion is not None

    @property
    def measured(self) -> tuple[Metric, ...]:
        """The metrics that measures compute."""
        return self.metrics

    @abstractmethod
    def usual(self, targets: Tensor) -> Loss:
        """The usual loss, for data of these targets."""

    def predictions(self, outputs: Tensor) -> Tensor:
        """What metrics take, of a model's outputs."""
        return outputs.float()

    def truth(self, targets: Tensor) -> Tensor:
        """What metrics take, of targets."""
        return targets

    def check(self, model: nn.Module, outputs: Any, targets: Tensor) -> None:
        """Raises UserError if what the model gives for some samples suits neither the loss nor the metrics."""
        if not isinstance(outputs, Tensor):
            more = "" if self.whole else "; a loss of your own may take all of it, with output='whole'"
            raise UserError(f"the model gives {named(outputs)}: let it give a tensor, or something with `logits`{more}")
        usually = self.criterion is None and own_loss(model) is None
        by_name = any(metric.name in known for metric in self.metrics for known in KNOWN.values())
        if (usually or by_name) and (wanted := self.wanted(outputs, targets)):
            raise UserError(f"the model gives outputs of shape {tuple(outputs.shape)}, and {wanted}")
        loss = self.loss(model, None, targets)
        if self.criterion is None:
            return
        called = f"the loss {_called(loss)}"
        try:
            value: Any = loss(outputs, targets)
        except Exception as error:  # the user's code
            shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
            raise UserError(f"{called} cannot be computed of {shapes}: {one_line(error)}") from None
        if not isinstance(value, Tensor) or value.numel() != 1:
            made = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else named(value)
            raise UserError(f"{called} gives {made}: let it give one number, the mean of a batch")
        if not value.isfinite():
            raise UserError(f"{called} gives {float(value.detach())} before any training: correct it")
        if outputs.requires_grad and not value.requires_grad:
            raise UserError(f"{called} has no gradient: compute it of the outputs, with torch's operations")

    def wanted(self, outputs: Tensor, targets: Tensor) -> str:
        """What outputs of some samples should be, where usual losses and metrics cannot be computed of them; else
        nothing."""
        return ""

    @property
    def perhaps(self) -> str:
        """Why training may give numbers that are not finite."""
        own = "" if self.criterion is None else f", or does the loss {_called(self.criterion)} give such?"
        return f"is lr too high{own or '?'}"

    def tensors(self, data: Split, device: str) -> tuple[Tensor, Tensor]:
        """All samples (n, …) and targets on the device, untransformed, images channels-last. Raises UserError if they
        cannot be used so."""
        x, y = data.load(device)
        return ready(x), y

    def samples(self, data: Split, device: str) -> tuple[Tensor | NamedTensors | LazySamples, Tensor]:
        """As `tensors`, but those of a data set of one's own are read as they are indexed, and some are of several
        tensors."""
        if isinstance(data.x, NamedTensors):
            return data.gathered(device), data.aimed(device)
        return data.lazy(device) if isinstance(data.x, Items) else self.tensors(data, device)

    def evaluate(
        self, model: nn.Module, x: Tensor | NamedTensors | LazySamples, y: Tensor, precision: Precision = "float32"
    ) -> tuple[Scores, float]:
        """The metrics of a model's predictions, in eval mode, and the sum of the losses.

        `precision`: of the forward passes; the losses are summed from float32.
        """
        loss, total = self.loss(model, None, y), 0.0
        measures: dict[str, Measure] = {}

        def take(outputs: Any, targets: Tensor) -> None:
            nonlocal total
            total += float(loss(outputs, targets)) * len(targets)
            predictions = self.predictions(outputs)
            if not measures:
                measures.update({m.name: m.make(predictions) for m in self.metrics})
            for measure in measures.values():
                measure.update(predictions.cpu(), self.truth(targets).cpu())

        evaluated(model, x, y, precision, take)
        found = {name: value_of(measure) for name, measure in measures.items()}
        return {name: (value * len(y), len(y)) for name, value in found.items() if value == value}, total

    def score(
        self, model: nn.Module, test: Split, device: str, precision: Precision, show: Show | None
    ) -> dict[str, float]:
        """By metric, what the server's test set tells of a model, if it has samples. `show`: pictures of predictions
        for people."""
        return values(self.evaluate(model, *test.lazy(device), precision)[0]) if len(test) else {}


@dataclass(frozen=True)
class Classification(Objective):
    """One of several classes: cross-entropy, of classes weighed as `weights` says.

    `balanced` weighs each client's classes by the inverse of how often it has them, 1 on average over its samples.
    """

    metrics: tuple[Metric, ...] = (known_metric("multiclass", "accuracy"),)
    weights: Weights | None = None

    suits: ClassVar[str] = "labels are learnt by models that give a logit a class"

    def loss(self, model: nn.Module, given: Loss | None, targets: Tensor) -> Loss:
        """As in `Objective`. Raises UserError for weights where there is another loss."""
        if self.weights is not None and (given or self.criterion or own_loss(model)):
            raise UserError("class weights are for the cross-entropy, and this method or model brings another loss")
        return super().loss(model, given, targets)

    def usual(self, targets: Tensor) -> Loss:
        """Cross-entropy, weighed."""
        return F.cross_entropy if self.weights is None else partial(_weighted, class_weights(self.weights, targets))

    def wanted(self, outputs: Tensor, targets: Tensor) -> str:
        """A logit for each class."""
        if outputs.dim() != 2 or len(outputs) != len(targets):
            return f"{len(targets)} samples need a logit for each class: ({len(targets)}, classes)"
        highest = int(targets.max())
        if highest >= outputs.shape[1]:
            return f"a label here is {highest}: give it {highest + 1} outputs, or number labels from 0"
        return _superfluous(self.weights, outputs)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Probabilities (n, classes)."""
        return outputs.float().softmax(1)

    @property
    def measured(self) -> tuple[Metric, ...]:
        """None for accuracy alone, which is counted, without torchmetrics."""
        return () if [metric.name for metric in self.metrics] == ["accuracy"] else self.metrics

    def evaluate(
        self, model: nn.Module, x: Tensor | NamedTensors | LazySamples, y: Tensor, precision: Precision = "float32"
    ) -> tuple[Scores, float]:
        """As in `Objective`; the losses are plain cross-entropies."""
        if self.measured:
            return super().evaluate(model, x, y, precision)
        correct, loss = 0, 0.0

        def take(outputs: Any, labels: Tensor) -> None:
            nonlocal correct, loss
            outputs = outputs.float()
            correct += int((outputs.argmax(1) == labels).sum())
            loss += float(F.cross_entropy(outputs, labels, reduction="sum"))

        evaluated(model, x, y, precision, take)
        return {"accuracy": (float(correct), len(y))}, loss


@dataclass(frozen=True)
class MultiLabel(Objective):
    """Any of several labels, 0 or 1 each, float32 (n, labels): binary cross-entropy of each."""

    metrics: tuple[Metric, ...] = (known_metric("multilabel", "f1"),)

    suits: ClassVar[str] = "several labels a sample are learnt by methods that do not look at labels, such as fedavg"

    def usual(self, targets: Tensor) -> Loss:
        """As said."""
        return _each_label

    def wanted(self, outputs: Tensor, targets: Tensor) -> str:
        """A logit for each label."""
        return "" if outputs.shape == targets.shape else f"targets are {tuple(targets.shape)}: give a logit for each"

    def predictions(self, outputs: Tensor) -> Tensor:
        """Probabilities (n, labels)."""
        return outputs.float().sigmoid()

    def truth(self, targets: Tensor) -> Tensor:
        """Whole numbers."""
        return targets.long()


@dataclass(frozen=True)
class Regression(Objective):
    """Numbers, float32 (n,) or (n, how many): the mean squared error."""

    metrics: tuple[Metric, ...] = (known_metric("regression", "mae"),)

    suits: ClassVar[str] = "numbers are learnt by methods that do not look at labels, such as fedavg"

    @property
    def any_scale(self) -> bool:
        """They are."""
        return True

    def usual(self, targets: Tensor) -> Loss:
        """As said."""
        return _squared

    def wanted(self, outputs: Tensor, targets: Tensor) -> str:
        """A number for each target."""
        fits = self.predictions(outputs).shape == self.truth(targets).shape
        return "" if fits else f"targets are {tuple(targets.shape)}: give a number for each"

    def predictions(self, outputs: Tensor) -> Tensor:
        """The outputs, (n,) where there is one a sample."""
        return self.truth(outputs.float())

    def truth(self, targets: Tensor) -> Tensor:
        """The targets, (n,) where there is one a sample."""
        return targets[:, 0] if targets.dim() == 2 and targets.shape[1] == 1 else targets


@dataclass(frozen=True)
class Segmentation(Objective):
    """A class for every pixel, int64 (n, height, width), 255 where there is none: their cross-entropy, of classes
    weighed as in `Classification`."""

    metrics: tuple[Metric, ...] = (known_metric("segmentation", "iou"),)
    weights: Weights | None = None

    suits: ClassVar[str] = (
        "classes of pixels are learnt by models that give logits (n, classes, height, width), such as unet, and by "
        "methods that do not look at labels, such as fedavg"
    )

    def usual(self, targets: Tensor) -> Loss:
        """As said."""
        weights = None if self.weights is None else class_weights(self.weights, targets[targets != IGNORED_PIXEL])
        return partial(_each_pixel, weights)

    def wanted(self, outputs: Tensor, targets: Tensor) -> str:
        """A logit for each class at every pixel."""
        n, height, width = targets.shape
        if outputs.dim() != 4 or outputs[:, 0].shape != targets.shape:
            return f"every pixel needs a logit for each class: ({n}, classes, {height}, {width})"
        highest = int(targets[targets != IGNORED_PIXEL].max()) if (targets != IGNORED_PIXEL).any() else 0
        if highest >= outputs.shape[1]:
            return f"a pixel is of class {highest}: give it {highest + 1} channels"
        return _superfluous(self.weights, outputs)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Probabilities (n, classes, height, width)."""
        return outputs.float().softmax(1)


@dataclass(frozen=True)
class NextToken(Objective):
    """The token after each one, int64 (n, length), -100 where none is asked for: their cross-entropy."""

    metrics: tuple[Metric, ...] = (known_metric("text", "perplexity"),)

    suits: ClassVar[str] = (
        "next tokens are learnt by models that give logits (n, length, tokens), and by methods that do not look at "
        "labels, such as fedavg"
    )

    def usual(self, targets: Tensor) -> Loss:
        """As said."""
        return _each_token

    def wanted(self, outputs: Tensor, targets: Tensor) -> str:
        """A logit for each token at every place."""
        n, length = targets.shape
        if outputs.dim() != 3 or outputs.shape[:2] != targets.shape:
            return f"every place needs a logit for each token: ({n}, {length}, tokens)"
        highest = int(targets.max())
        return "" if highest < outputs.shape[2] else f"a token is {highest}: give {highest + 1} logits"


@dataclass(frozen=True)
class Own(Objective):
    """Whatever a loss of one's own learns."""

    suits: ClassVar[str] = "a loss of one's own is learnt by methods that do not look at labels, such as fedavg"

    def usual(self, targets: Tensor) -> Loss:
        """Raises UserError: there is none."""
        raise UserError("what is learnt of such targets is not known here: give a loss")


OBJECTIVES: Mapping[Kind, tuple[type[Objective], str]] = {
    "classes": (Classification, "multiclass"),
    "labels": (MultiLabel, "multilabel"),
    "numbers": (Regression, "regression"),
    "masks": (Segmentation, "segmentation"),
    "tokens": (NextToken, "text"),
}
"""Objectives by what is learnt, and which metrics each knows by name (a key of `fewbytes.core.metrics.KNOWN`)."""


def objective_for(
    learns: Kind,
    metrics: str | Sequence[str] | Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    weights: Weights | None = None,
    classes: int = 0,
) -> Objective:
    """The objective of data of which that is learnt: with a loss of one's own, metrics by name or of one's own (by name
    what `metrics_of` takes), class weights, of `classes` at least. Raises UserError for what there is not, or cannot be
    together."""
    kind, known = OBJECTIVES.get(learns, (Own, None))
    options: dict[str, Any] = {"criterion": loss}
    if isinstance(metrics, Mapping) and metrics:
        options["metrics"] = metrics_of(metrics)
    elif (names := _names(metrics)) and known is None:
        raise UserError("metrics by name are for what is learnt usually: give yours as {name: metric}")
    elif names and known is not None:
        options["metrics"] = tuple(known_metric(known, each) for each in names)
    if weights is not None:
        if learns not in ("classes", "masks"):
            raise UserError("class weights are for learning one of several classes, of samples or of pixels")
        options["weights"] = checked_weights(weights, classes)
    return kind(**options)


def _names(metrics: Any) -> list[str]:
    """Metrics by name, each once. Raises UserError for what is no name."""
    given = list(metrics or ()) if isinstance(metrics, Mapping | list | tuple | None) else [metrics]
    for each in given:
        if not isinstance(each, str):
            raise UserError(f"a metric is a name, or, of your own, {{name: metric}}, not {named(each)}")
    return list(dict.fromkeys(given))


def checked_weights(weights: Any, classes: int) -> Weights:
    """Class weights that can be, for at least so many classes. Raises UserError for others."""
    if weights == "balanced":
        return "balanced"
    try:
        given = () if isinstance(weights, str) else tuple(float(weight) for weight in weights)
    except (TypeError, ValueError):
        given = ()
    if not any(given) or len(given) < classes or not all(0 <= weight < math.inf for weight in given):
        raise UserError(
            f"class weights are 'balanced', or a number of 0 or more for each of the {classes} classes, not all 0, "
            f"and not {weights!r}"
        )
    return given


def class_weights(weights: Weights, targets: Tensor) -> Tensor:
    """A weight for each class: those given, or by targets (n,) the inverse of how many are of it, 1 on average over
    them all; 0 for what none is of."""
    if weights != "balanced":
        return torch.tensor(weights, device=targets.device)
    counts = torch.bincount(targets)
    inverse = len(targets) / (max(1, int((counts > 0).sum())) * counts.clamp(min=1))
    return torch.where(counts > 0, inverse, 0.0)


def evaluated(
    model: nn.Module,
    x: Tensor | NamedTensors | LazySamples,
    y: Tensor,
    precision: Precision,
    take: Callable[[Any, Tensor], None],
) -> None:
    """Have `take` look at what the model gives for each batch of samples, in eval mode, and its targets; the forward
    passes are in that precision."""
    training = model.training
    model.to(x.device).eval()
    with torch.no_grad(), arithmetic(precision, str(x.device)):
        for start in range(0, len(y), EVALUATION_BATCH):
            rows = slice(start, start + EVALUATION_BATCH)
            take(model(x[rows]), y[rows])
    in_training(model) if training else model.eval()


def _superfluous(weights: Weights | None, outputs: Tensor) -> str:
    """What is wrong with class weights for such outputs, if there are more."""
    fits = weights is None or weights == "balanced" or len(weights) <= outputs.shape[1]
    return "" if fits else f"there are {len(weights or ())} class weights: give one for each class"


def _called(loss: Loss) -> str:
    """A loss as people know it."""
    return getattr(loss, "__qualname__", type(loss).__name__)


def _weighted(weights: Tensor, outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, F.pad(weights, (0, outputs.shape[1] - len(weights))))


def _each_label(outputs: Any, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype))


def _squared(outputs: Any, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs.view_as(targets), targets)


def _each_pixel(weights: Tensor | None, outputs: Any, targets: Tensor) -> Tensor:
    if weights is not None:
        weights = F.pad(weights, (0, outputs.shape[1] - len(weights)))
    return F.cross_entropy(outputs, targets, weights, ignore_index=IGNORED_PIXEL)


def _each_token(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TOKEN)
