"""Scores of predictions on test sets, their intervals, and paired differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from fewbytes.core.intervals import RESAMPLES, interval, resamples
from fewbytes.core.known_metrics import known_metric
from fewbytes.core.metrics import Metric
from fewbytes.core.objectives import Classification
from fewbytes.core.tested import Predictions, Scored, difference
from fewbytes.data.split import Split

ACCURACY = known_metric("multiclass", "accuracy")


class Distance:
    """The mean distance from the truth: lower is better."""

    def __init__(self, predictions: torch.Tensor) -> None:
        self.all = []

    def update(self, predictions, targets):
        self.all.append((predictions - targets).abs())

    def compute(self):
        return torch.cat(self.all).mean()


def classes(right: list[bool], seed: int = 0) -> Predictions:
    """Predictions of two classes, right or wrong."""
    truth = torch.from_numpy(np.random.default_rng(seed).integers(2, size=len(right)))
    guessed = torch.where(torch.tensor(right, dtype=torch.bool), truth, 1 - truth)
    return Predictions(nn.functional.one_hot(guessed, 2).float(), truth)


def test_a_models_predictions_are_of_all_samples_in_order():
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), Split.of((torch.rand(700, 3), torch.randint(2, (700,))))  # several batches
    found = Predictions.of(model, data.take(range(600, 0, -1)), Classification())
    x, y = data.load()
    assert torch.allclose(found.predicted, model(x[range(600, 0, -1)]).softmax(1), atol=1e-6)
    assert torch.equal(found.truth, y[range(600, 0, -1)])
    matrix = torch.tensor(found.confusion())
    assert matrix.sum() == 600
    assert matrix.diag().sum() / 600 == pytest.approx(Scored.of(ACCURACY, found, 0).value)


def test_the_accuracy_and_its_interval_are_those_of_the_definition():
    found = classes([i % 5 != 0 for i in range(60)])
    scored = Scored.of(ACCURACY, found, seed=3)
    assert scored.value == 0.8
    expected = interval(lambda p, y: (p.argmax(1) == y).double().mean(), found.predicted, found.truth, seed=3)
    assert scored.figure[1:] == expected
    assert scored.figure.low < 0.8 < scored.figure.high


def test_a_difference_is_paired():
    """Two models that err on nearly the same samples differ surely by little, by which neither interval alone shows."""
    one, other = [i >= 30 for i in range(100)], [i >= 36 for i in range(100)]
    scored = [Scored.of(ACCURACY, classes(right), 1) for right in (one, other)]
    gap = difference([(scored[0], scored[1])], higher=True)
    assert gap.value == pytest.approx(0.06)
    assert 0 < gap.low < 0.06 < gap.high
    assert scored[0].figure.low < scored[1].figure.value  # not paired, one could not tell them apart
    rows = [r.numpy() for r in resamples(100, 1)]
    by_hand = [np.array(one)[r].mean() - np.array(other)[r].mean() for r in rows]
    assert (gap.low, gap.high) == pytest.approx(tuple(np.quantile(by_hand, [0.025, 0.975])))


def test_the_mean_over_sites_weighs_them_equally_and_redraws_within_each():
    large = Scored.of(ACCURACY, classes([True] * 200), 0), Scored.of(ACCURACY, classes([i % 2 for i in range(200)]), 0)
    small = Scored.of(ACCURACY, classes([True, False] * 5), 1), Scored.of(ACCURACY, classes([True, False] * 5), 1)
    gap = difference([large, small], higher=True)
    assert gap.value == pytest.approx((0.5 + 0) / 2)
    assert gap.low < gap.value < gap.high
    assert difference([small, small], higher=True) == (0, 0, 0)


def test_of_errors_less_is_better():
    metric = Metric("distance", Distance, higher=False, share=False)
    truth = torch.arange(50.0)
    near, far = (Scored.of(metric, Predictions(truth + by, truth), 0) for by in (1.0, 3.0))
    assert (near.value, far.value) == (1, 3)
    assert difference([(near, far)], higher=False) == (2, 2, 2)


def test_what_is_undefined_is_left_out():
    """An AUC of one class, or of no sample."""
    metric = Metric("none", lambda _: type("M", (), {"update": lambda *_: None, "compute": lambda _: math.nan})())
    undefined, defined = Scored.of(metric, classes([True]), 0), Scored.of(ACCURACY, classes([True, False]), 0)
    assert all(map(math.isnan, undefined.figure))
    assert all(map(math.isnan, Scored.of(ACCURACY, classes([]), 0).figure))
    assert all(map(math.isnan, difference([(undefined, defined)], True)))
    assert difference([(undefined, defined), (defined, defined)], True) == (0, 0, 0)
    assert Scored.of(ACCURACY, classes([True]), 0, drawn=False).value == 1
    assert len(Scored.of(ACCURACY, classes([True]), 0, drawn=False).draws) == RESAMPLES
