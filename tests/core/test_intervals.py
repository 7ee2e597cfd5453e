"""Bootstrap intervals: they cover the true value as often as they say, and depend on their arguments alone."""

import math

import numpy as np
import pytest
import torch

from fewbytes.base.errors import UserError
from fewbytes.core import intervals
from fewbytes.core.intervals import interval


def mean(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (predictions == labels).float().mean()


def test_an_interval_is_that_of_the_normal_approximation() -> None:
    right = torch.arange(400) < 300
    low, high = interval(mean, right.long(), torch.ones(400, dtype=torch.long), seed=1)
    half = 1.96 * math.sqrt(0.75 * 0.25 / 400)
    assert (low, high) == pytest.approx((0.75 - half, 0.75 + half), abs=0.008)
    narrow = interval(mean, right.long(), torch.ones(400, dtype=torch.long), seed=1, level=0.5)
    assert low < narrow[0] < 0.75 < narrow[1] < high


def test_it_covers_the_true_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "RESAMPLES", 200)
    rng, covered = np.random.default_rng(3), 0
    for seed in range(100):
        right = torch.from_numpy(rng.random(150) < 0.8).long()
        low, high = interval(mean, right, torch.ones(150, dtype=torch.long), seed)
        covered += low <= 0.8 <= high
    assert 87 <= covered <= 100


def test_it_depends_only_on_its_arguments() -> None:
    labels = torch.tensor([0, 1, 1] * 20)
    predictions = torch.tensor([0, 1, 0] * 20)
    first = interval(mean, predictions, labels, seed=1)
    torch.manual_seed(99)
    assert interval(mean, predictions, labels, seed=1) == first != interval(mean, predictions, labels, seed=2)


def test_draws_without_a_score_are_left_out() -> None:
    def only_both(predictions: torch.Tensor, labels: torch.Tensor) -> float:
        return float(predictions.float().mean()) if len(labels.unique()) == 2 else math.nan

    few = torch.tensor([0, 1] + [1] * 4)
    assert all(0 <= bound <= 1 for bound in interval(only_both, few, few, seed=0))
    one = torch.ones(5, dtype=torch.long)
    assert all(map(math.isnan, interval(only_both, one, one, seed=0)))
    assert all(map(math.isnan, interval(only_both, one[:0], one[:0], seed=0)))


def test_errors() -> None:
    with pytest.raises(UserError, match="between 0 and 1, not 95"):
        interval(mean, torch.ones(3), torch.ones(3), 0, level=95)
    with pytest.raises(UserError, match="3 predictions for 2 labels"):
        interval(mean, torch.ones(3), torch.ones(2), 0)
