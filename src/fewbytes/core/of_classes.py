"""Metrics of classes and labels, computed exactly from all predictions: counts, ranks, calibration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 15
"""Number of equally wide bins of probabilities for the calibration error."""
Score = Callable[[Tensor, Tensor], float]
"""Of probabilities (n, classes) and labels (n,), or 0 and 1 (n, classes) for independent labels; NaN if undefined."""


class OfAll:
    """A measure that computes a score of all added predictions together."""

    def __init__(self, score: Score, predictions: Tensor | None = None) -> None:
        self.score = score
        self._predictions, self._targets = list[Tensor](), list[Tensor]()

    def update(self, predictions: Tensor, targets: Tensor) -> Any:
        """Add a batch."""
        self._predictions.append(predictions)
        self._targets.append(targets)

    def compute(self) -> float:
        """The score."""
        return self.score(torch.cat(self._predictions), torch.cat(self._targets))


def confusion(predictions: Tensor, labels: Tensor) -> Tensor:
    """Counts, int64 (classes, classes): rows are true classes, columns predicted ones, those of the highest
    probability."""
    classes = predictions.shape[1]
    return torch.bincount(labels * classes + predictions.argmax(1), minlength=classes**2).view(classes, classes)


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """The share of correct predictions."""
    return float((predictions.argmax(1) == labels).double().mean())


def balanced_accuracy(predictions: Tensor, labels: Tensor) -> float:
    """The mean, over classes with samples, of the share of the class's samples that are found; for two classes the mean
    of sensitivity and specificity."""
    counts = confusion(predictions, labels).double()
    there = counts.sum(1) > 0
    return float((counts.diag() / counts.sum(1))[there].mean())


def kappa(predictions: Tensor, labels: Tensor) -> float:
    """Cohen's kappa: the agreement beyond chance; NaN if predictions and labels are all of one class."""
    counts = confusion(predictions, labels).double() / len(labels)
    chance = float(counts.sum(0) @ counts.sum(1))
    return (float(counts.diag().sum()) - chance) / (1 - chance) if chance < 1 else math.nan


def _found(counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By class, the numbers of correct, of true and of predicted samples."""
    return counts.diag(), counts.sum(1), counts.sum(0)


def _mean_of_classes(values: Tensor, counts: Tensor) -> float:
    """The mean over classes that occur or are predicted."""
    there = (counts.sum(0) + counts.sum(1)) > 0
    return float(values[there].mean())


def recall(predictions: Tensor, labels: Tensor) -> float:
    """The share of a class's samples that are found; mean over classes that occur or are predicted."""
    counts = confusion(predictions, labels).double()
    right, true, _ = _found(counts)
    return _mean_of_classes(right / true.clamp(min=1), counts)


def precision(predictions: Tensor, labels: Tensor) -> float:
    """The share of a class's predictions that are correct; mean over classes that occur or are predicted."""
    counts = confusion(predictions, labels).double()
    right, _, named = _found(counts)
    return _mean_of_classes(right / named.clamp(min=1), counts)


def f1(predictions: Tensor, labels: Tensor) -> float:
    """The harmonic mean of precision and recall; mean over classes that occur or are predicted."""
    counts = confusion(predictions, labels).double()
    right, true, named = _found(counts)
    return _mean_of_classes(2 * right / (true + named).clamp(min=1), counts)


# Of one class, the positive one ---------------------------------------------------------------------------------------


def _decided(predictions: Tensor, labels: Tensor, positive: int) -> tuple[Tensor, Tensor]:
    """Whether each sample is predicted, and is, of the positive class."""
    return predictions.argmax(1) == positive, labels == positive


def _share(of: Tensor, among: Tensor) -> float:
    """The share of true entries of `of` among those; NaN if there are none."""
    return float(of[among].double().mean()) if bool(among.any()) else math.nan


def sensitivity(predictions: Tensor, labels: Tensor, positive: int) -> float:
    """The share of positive samples that are predicted positive."""
    guessed, true = _decided(predictions, labels, positive)
    return _share(guessed, true)


def specificity(predictions: Tensor, labels: Tensor, positive: int) -> float:
    """The share of other samples that are not predicted positive."""
    guessed, true = _decided(predictions, labels, positive)
    return _share(~guessed, ~true)


def precision_of(predictions: Tensor, labels: Tensor, positive: int) -> float:
    """The share of positive predictions that are correct; 0 without any."""
    guessed, true = _decided(predictions, labels, positive)
    return _share(true, guessed) if bool(guessed.any()) else 0.0


def f1_of(predictions: Tensor, labels: Tensor, positive: int) -> float:
    """The harmonic mean of the positive class's precision and sensitivity."""
    guessed, true = _decided(predictions, labels, positive)
    both = int(guessed.sum()) + int(true.sum())
    return 2 * int((guessed & true).sum()) / both if both else math.nan


def sensitivity_at(predictions: Tensor, labels: Tensor, positive: int, specificity: float) -> float:
    """The highest sensitivity, over thresholds of the positive class's probability, at a specificity of at least this.
    NaN without positive or without other samples."""
    return _rate_at(predictions[:, positive], labels == positive, specificity)


def specificity_at(predictions: Tensor, labels: Tensor, positive: int, sensitivity: float) -> float:
    """The highest specificity, over thresholds of the positive class's probability, at a sensitivity of at least this.
    NaN without positive or without other samples."""
    return _rate_at(-predictions[:, positive], labels != positive, sensitivity)


def _rate_at(scores: Tensor, true: Tensor, rejected: float) -> float:
    """The highest share of true samples with scores above a threshold, of thresholds that reject at least this share of
    the others."""
    if bool(true.all()) or not bool(true.any()):
        return math.nan
    others = scores[~true].sort().values
    least = math.ceil(rejected * len(others) - 1e-9)  # so many are at or below the threshold
    if not least:
        return 1.0
    return float((scores[true] > others[least - 1]).double().mean())


def auc_of(scores: Tensor, true: Tensor) -> float:
    """The area under the ROC curve of scores (n,), from their ranks: the share of (true, other) pairs in order, ties
    counted half. NaN without true or without other samples."""
    positives = int(true.sum())
    others = len(true) - positives
    if not positives or not others:
        return math.nan
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts.double() - 1) / 2)[place]  # tied samples share their mean rank
    return (float(ranks[true].sum()) - positives * (positives + 1) / 2) / (positives * others)


def average_precision_of(scores: Tensor, true: Tensor) -> float:
    """The precision at each threshold of scores (n,), weighted by the increase of recall. NaN without true or without
    other samples."""
    positives = int(true.sum())
    if not positives or positives == len(true):
        return math.nan
    order = scores.argsort(descending=True)
    hits = true[order].double().cumsum(0)
    last = torch.ones(len(order), dtype=torch.bool)  # of equal scores
    last[:-1] = scores[order].diff() != 0
    hits, named = hits[last], torch.arange(1, len(order) + 1, dtype=torch.float64)[last]
    return float((hits / named * hits.diff(prepend=torch.zeros(1, dtype=torch.float64))).sum()) / positives


def auc(predictions: Tensor, targets: Tensor, positive: int | None = None) -> float:
    """See `auc_of` and `ranked`."""
    return ranked(auc_of, predictions, targets, positive)


def average_precision(predictions: Tensor, targets: Tensor, positive: int | None = None) -> float:
    """See `average_precision_of` and `ranked`."""
    return ranked(average_precision_of, predictions, targets, positive)


def ranked(of: Score, predictions: Tensor, targets: Tensor, positive: int | None = None) -> float:
    """A score of ranks: of the positive class, or the mean over classes with both positive and negative samples. NaN if
    there are none."""
    true = targets.bool() if targets.dim() == 2 else F.one_hot(targets, predictions.shape[1]).bool()
    columns = range(predictions.shape[1]) if positive is None else [positive]
    found = [value for c in columns if not math.isnan(value := of(predictions[:, c], true[:, c]))]
    return math.fsum(found) / len(found) if found else math.nan


# Calibration ----------------------------------------------------------------------------------------------------------


def brier(predictions: Tensor, labels: Tensor, positive: int | None = None) -> float:
    """Brier's score: the mean squared difference of probabilities and outcomes (0 or 1), of the positive class, or
    summed over classes; of two classes the same either way."""
    true = F.one_hot(labels, predictions.shape[1]).double()
    squares = (predictions.double() - true).square()
    if positive is not None:
        return float(squares[:, positive].mean())
    return float(squares.sum(1).mean()) / (2 if predictions.shape[1] == 2 else 1)


def calibration_error(predictions: Tensor, labels: Tensor, positive: int | None = None) -> float:
    """The expected calibration error: the mean difference, over samples, between the probability and the frequency of
    the outcome in its bin, one of BINS. The outcome: the predicted class is correct, or the sample is positive."""
    if positive is None:
        probabilities, guessed = predictions.max(1)
        true = guessed == labels
    else:
        probabilities, true = predictions[:, positive], labels == positive
    place = (probabilities.double() * BINS).ceil().long().clamp(1, BINS) - 1  # a bin includes its upper bound
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add(0, place, probabilities.double() - true.double())
    return float(gaps.abs().sum()) / len(labels)
