"""The usual objectives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.errors import UserError, named
from fewbytes.core.devices import Precision
from fewbytes.core.intervals import interval
from fewbytes.core.known_metrics import known_metric, metrics_of
from fewbytes.core.metrics import Metric, Scores
from fewbytes.core.objective import ClassWeights, Objective, evaluated
from fewbytes.core.of_classes import OfAll, confusion
from fewbytes.core.training import Loss, own_loss
from fewbytes.data.named import NamedTensors
from fewbytes.data.split import IGNORED_PIXEL, IGNORED_TOKEN, Kind, LazySamples, Split

MOST_CLASSES = 50  # of a confusion matrix that people read
MOST_SAMPLES = 5000  # for which intervals take less than seconds


@dataclass(frozen=True)
class Classification(Objective):
    """One of several classes: cross-entropy, with class `weights`.

    `balanced` weighs each client's classes by their inverse frequency, with mean 1 over its samples.
    """

    metrics: tuple[Metric, ...] = (known_metric("multiclass", "accuracy"),)
    weights: ClassWeights | None = None

    suits: ClassVar[str] = "labels are learnt by models that give a logit a class"

    def loss(self, model: nn.Module, given: Loss | None, targets: Tensor) -> Loss:
        """See `Objective`. Raises UserError for class weights with another loss."""
        if self.weights is not None and (given or self.criterion or own_loss(model)):
            raise UserError("class weights are for the cross-entropy, and this method or model brings another loss")
        return super().loss(model, given, targets)

    def usual(self, targets: Tensor) -> Loss:
        """Weighted cross-entropy."""
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
        """Empty for accuracy alone, which is counted without torchmetrics."""
        return () if [metric.name for metric in self.metrics] == ["accuracy"] else self.metrics

    def evaluate(
        self, model: nn.Module, x: Tensor | NamedTensors | LazySamples, y: Tensor, precision: Precision = "float32"
    ) -> tuple[Scores, float]:
        """See `Objective`; the losses are unweighted cross-entropies."""
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

    def details(self, model: nn.Module, test: Split, device: str, precision: Precision, seed: int) -> dict[str, Any]:
        """`confusion`: numbers of samples, rows are true classes, columns predicted ones, of up to MOST_CLASSES.
        `intervals`: of each metric by name, if the user gave metrics, for up to MOST_SAMPLES samples."""
        given: list[tuple[Tensor, Tensor]] = []

        def take(outputs: Any, labels: Tensor) -> None:
            given.append((self.predictions(outputs).cpu(), labels.cpu()))

        evaluated(model, *test.lazy(device), precision, take)
        if not given:
            return {}
        predictions, labels = (torch.cat(each) for each in zip(*given, strict=True))
        found: dict[str, Any] = {}
        if predictions.shape[1] <= MOST_CLASSES:
            found["confusion"] = confusion(predictions, labels).tolist()
        intervals = dict[str, list[float]]()
        for metric in self.measured if len(labels) <= MOST_SAMPLES else ():
            measure = metric.make(predictions)
            if isinstance(measure, OfAll):
                low, high = interval(measure.score, predictions, labels, seed)
                intervals |= {metric.name: [low, high]} if low == low else {}
        return found | ({"intervals": intervals} if intervals else {})


@dataclass(frozen=True)
class MultiLabel(Objective):
    """Any of several labels, 0 or 1 each, float32 (n, labels): binary cross-entropy of each."""

    metrics: tuple[Metric, ...] = (known_metric("multilabel", "f1"),)

    suits: ClassVar[str] = "several labels per sample need a method that uses no class labels, such as fedavg"

    def usual(self, targets: Tensor) -> Loss:
        """Binary cross-entropy."""
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

    suits: ClassVar[str] = "regression needs a method that uses no class labels, such as fedavg"

    @property
    def any_scale(self) -> bool:
        """Always."""
        return True

    def usual(self, targets: Tensor) -> Loss:
        """Mean squared error."""
        return _squared

    def wanted(self, outputs: Tensor, targets: Tensor) -> str:
        """A number for each target."""
        fits = self.predictions(outputs).shape == self.truth(targets).shape
        return "" if fits else f"targets are {tuple(targets.shape)}: give a number for each"

    def predictions(self, outputs: Tensor) -> Tensor:
        """The outputs, (n,) if there is one per sample."""
        return self.truth(outputs.float())

    def truth(self, targets: Tensor) -> Tensor:
        """The targets, (n,) if there is one per sample."""
        return targets[:, 0] if targets.dim() == 2 and targets.shape[1] == 1 else targets


@dataclass(frozen=True)
class Segmentation(Objective):
    """A class for every pixel, int64 (n, height, width), 255 for none: cross-entropy, with class weights as in
    `Classification`."""

    metrics: tuple[Metric, ...] = (known_metric("segmentation", "iou"),)
    weights: ClassWeights | None = None

    suits: ClassVar[str] = (
        "classes of pixels are learnt by models that give logits (n, classes, height, width), such as unet, and by "
        "methods that use no class labels, such as fedavg"
    )

    def usual(self, targets: Tensor) -> Loss:
        """Weighted cross-entropy of pixels."""
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
    """The next token at each position, int64 (n, length), -100 for none: cross-entropy."""

    metrics: tuple[Metric, ...] = (known_metric("text", "perplexity"),)

    has_head: ClassVar[bool] = False
    suits: ClassVar[str] = (
        "next tokens are learnt by models that give logits (n, length, tokens), and by methods that do not look at "
        "labels, such as fedavg"
    )

    def usual(self, targets: Tensor) -> Loss:
        """Cross-entropy of tokens."""
        return _each_token

    def wanted(self, outputs: Tensor, targets: Tensor) -> str:
        """A logit for each token at every position."""
        n, length = targets.shape
        if outputs.dim() != 3 or outputs.shape[:2] != targets.shape:
            return f"every place needs a logit for each token: ({n}, {length}, tokens)"
        highest = int(targets.max())
        return "" if highest < outputs.shape[2] else f"a token is {highest}: give {highest + 1} logits"


@dataclass(frozen=True)
class Own(Objective):
    """Any objective defined by the user's loss."""

    suits: ClassVar[str] = "your own loss needs a method that uses no class labels, such as fedavg"

    def usual(self, targets: Tensor) -> Loss:
        """Raises UserError: there is none."""
        raise UserError("there is no usual loss for such targets: give a loss")


OBJECTIVES: Mapping[Kind, tuple[type[Objective], str]] = {
    "classes": (Classification, "multiclass"),
    "labels": (MultiLabel, "multilabel"),
    "numbers": (Regression, "regression"),
    "masks": (Segmentation, "segmentation"),
    "tokens": (NextToken, "text"),
}
"""Objectives by kind of learning, and each one's kind of metrics (a key of `fewbytes.core.metric_names.KNOWN`)."""


def objective_for(
    learns: Kind,
    metrics: str | Sequence[str] | Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    weights: ClassWeights | None = None,
    classes: int = 0,
    positive: int | None = None,
) -> Objective:
    """The objective for data of this kind: with the user's loss, metrics by name or users' own (a mapping for
    `metrics_of`), class weights, for at least `classes` classes. `positive`: the number of the class that metrics by
    name are of (`fewbytes.core.known_metrics`). Raises UserError for unknown or incompatible ones."""
    kind, known = OBJECTIVES.get(learns, (Own, None))
    if positive is not None:
        _check_positive(positive, learns, metrics, classes)
    options: dict[str, Any] = {"criterion": loss}
    if isinstance(metrics, Mapping) and metrics:
        options["metrics"] = metrics_of(metrics)
    elif (names := _names(metrics)) and known is None:
        raise UserError("metrics by name are for the usual objectives: give yours as {name: metric}")
    elif names and known is not None:
        options["metrics"] = tuple(known_metric(known, each, positive) for each in names)
    if weights is not None:
        if learns not in ("classes", "masks"):
            raise UserError("class weights are for learning one of several classes, of samples or of pixels")
        options["weights"] = checked_weights(weights, classes)
    return kind(**options)


def _check_positive(positive: Any, learns: Kind, metrics: Any, classes: int) -> None:
    """Raises UserError for a positive class where there is none."""
    if learns != "classes":
        raise UserError(f"positive is one of several classes, and the targets are {learns}: leave it out")
    if not isinstance(positive, int) or isinstance(positive, bool) or not 0 <= positive < max(classes, 2):
        raise UserError(f"positive is the number of a class, 0 to {max(classes, 2) - 1}, not {named(positive)}")
    if not metrics or isinstance(metrics, Mapping):
        raise UserError("positive is for metrics of one class, by name: give some, like auc, sensitivity, specificity")


def _names(metrics: Any) -> list[str]:
    """Metric names, without duplicates. Raises UserError for anything but names."""
    given = list(metrics or ()) if isinstance(metrics, Mapping | list | tuple | None) else [metrics]
    for each in given:
        if not isinstance(each, str):
            raise UserError(f"a metric is a name, or, of your own, {{name: metric}}, not {named(each)}")
    return list(dict.fromkeys(given))


def checked_weights(weights: Any, classes: int) -> ClassWeights:
    """Valid class weights, for at least `classes` classes. Raises UserError for others."""
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


def class_weights(weights: ClassWeights, targets: Tensor) -> Tensor:
    """A weight for each class: the given ones, or the inverse class frequency in targets (n,), with mean 1 over them; 0
    for absent classes."""
    if weights != "balanced":
        return torch.tensor(weights, device=targets.device)
    counts = torch.bincount(targets)
    inverse = len(targets) / (max(1, int((counts > 0).sum())) * counts.clamp(min=1))
    return torch.where(counts > 0, inverse, 0.0)


def _superfluous(weights: ClassWeights | None, outputs: Tensor) -> str:
    """The error of too many class weights for such outputs; empty if there is none."""
    fits = weights is None or weights == "balanced" or len(weights) <= outputs.shape[1]
    return "" if fits else f"there are {len(weights or ())} class weights: give one for each class"


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
