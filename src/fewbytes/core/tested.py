"""Models on sites' test sets: predictions, scores with intervals, and paired differences of scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fewbytes.core.devices import Precision
from fewbytes.core.intervals import RESAMPLES, bounds, resamples
from fewbytes.core.metrics import Metric, value_of
from fewbytes.core.objective import Objective, evaluated
from fewbytes.data.split import Split

CURVE = 10  # bins of a calibration curve
SMALL = 1 << 20  # values of predictions, up to which intervals are computed


class Figure(NamedTuple):
    """A score or a difference of scores, and its interval; NaN where undefined."""

    value: float
    low: float
    high: float


def defined(figure: Figure) -> tuple[float | None, float | None, float | None]:
    """A figure with None in place of NaN."""
    value, low, high = (None if math.isnan(each) else each for each in figure)
    return value, low, high


@dataclass(frozen=True)
class Predictions:
    """A model's predictions (n, …) for a test set, as metrics take them, and the truth (n, …), on the CPU."""

    predicted: Tensor
    truth: Tensor

    @classmethod
    def of(
        cls, model: nn.Module, data: Split, objective: Objective, device: str = "cpu", precision: Precision = "float32"
    ) -> Predictions:
        """A model's predictions for all samples of a split."""
        found: list[tuple[Tensor, Tensor]] = []

        def take(outputs: Any, targets: Tensor) -> None:
            found.append((objective.predictions(outputs).cpu(), objective.truth(targets).cpu()))

        evaluated(model.to(device), *objective.samples(data, device), precision, take)
        predicted, truth = zip(*found, strict=True)
        return cls(torch.cat(predicted), torch.cat(truth))

    def __len__(self) -> int:
        return len(self.truth)

    def rows(self, rows: Tensor) -> Predictions:
        """Those of some samples."""
        return Predictions(self.predicted[rows], self.truth[rows])

    @classmethod
    def together(cls, parts: Sequence[Predictions]) -> Predictions:
        """Those of several test sets."""
        return cls(torch.cat([part.predicted for part in parts]), torch.cat([part.truth for part in parts]))

    def calibration(self, positive: int | None = None, least: int = 1) -> list[tuple[float, float, int]]:
        """The calibration curve: (mean probability, frequency of the outcome, number of samples) of each of CURVE
        equally wide bins of probabilities that has samples; neighbours are merged to at least `least` samples. The
        outcome: the sample is of the `positive` class; None: the predicted class is correct."""
        if positive is None:
            probability, guessed = self.predicted.double().max(1)
            outcome = guessed == self.truth
        else:
            probability, outcome = self.predicted[:, positive].double(), self.truth == positive
        place = (probability * CURVE).ceil().long().clamp(1, CURVE) - 1  # a bin includes its upper bound
        sums = torch.zeros(CURVE, 3, dtype=torch.float64)
        sums.index_add_(0, place, torch.stack([probability, outcome.double(), torch.ones(len(place)).double()], 1))
        bins = [list[float](each) for each in sums.tolist() if each[2]]
        while len(bins) > 1 and min(bins, key=lambda each: each[2])[2] < least:
            small = min(range(len(bins)), key=lambda i: bins[i][2])
            one = bins.pop(small)
            near = min(small, len(bins) - 1)
            bins[near] = [a + b for a, b in zip(bins[near], one, strict=True)]
        return [(p / n, o / n, round(n)) for p, o, n in bins]

    def confusion(self) -> list[list[int]]:
        """The number of samples by true class (rows) and predicted class (columns)."""
        classes = self.predicted.shape[1]
        counts = torch.bincount(self.truth * classes + self.predicted.argmax(1), minlength=classes * classes)
        table: list[list[int]] = counts.view(classes, classes).tolist()
        return table


@dataclass(frozen=True)
class Scored:
    """A metric of predictions for a test set, NaN where undefined, and of its resamples (RESAMPLES,).

    Resamples of test sets of one size with one seed are the same samples, so that models can be compared in pairs.
    """

    value: float
    draws: NDArray[np.float64]

    @classmethod
    def of(cls, metric: Metric, found: Predictions, seed: int, drawn: bool = True) -> Scored:
        """A metric of predictions; without resamples unless `drawn`, and if predictions are large, as of masks."""
        one = _right if _is_accuracy(metric, found) else partial(_measured, metric)
        value = one(found) if len(found) else math.nan
        if not drawn or math.isnan(value) or found.predicted.numel() > SMALL:
            return cls(value, np.full(RESAMPLES, math.nan))
        return cls(value, np.array([one(found.rows(rows)) for rows in resamples(len(found), seed)]))

    @property
    def figure(self) -> Figure:
        """The metric with its interval."""
        return Figure(self.value, *bounds(self.draws))


def difference(pairs: Sequence[tuple[Scored, Scored]], higher: bool) -> Figure:
    """By how much the first of each pair is better than the second, on average over the pairs (a test set each), with
    its interval; samples are redrawn within each test set. `higher`: whether higher values are better. Pairs without a
    score are left out."""
    defined = [pair for pair in pairs if not any(math.isnan(each.value) for each in pair)]
    if not defined:
        return Figure(math.nan, math.nan, math.nan)
    sign = 1 if higher else -1
    value = float(np.mean([sign * (one.value - other.value) for one, other in defined]))
    return Figure(value, *bounds(np.mean([sign * (one.draws - other.draws) for one, other in defined], axis=0)))


def _measured(metric: Metric, found: Predictions) -> float:
    measure = metric.make(found.predicted)
    measure.update(found.predicted, found.truth)
    return value_of(measure)


def _is_accuracy(metric: Metric, found: Predictions) -> bool:
    """Whether the metric is the accuracy of classes, which needs no package."""
    return metric.known and metric.name == "accuracy" and found.predicted.dim() == 2 and found.truth.dim() == 1


def _right(found: Predictions) -> float:
    return float((found.predicted.argmax(1) == found.truth).double().mean())
