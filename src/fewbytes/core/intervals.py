"""Bootstrap intervals of metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbytes.base.errors import UserError
from fewbytes.base.streams import stream

RESAMPLES = 1000
"""Number of resamples of an interval."""
LEVEL = 0.95
"""Share of resamples within an interval."""


def interval(
    score: Callable[[Tensor, Tensor], Any], predictions: Tensor, labels: Tensor, seed: int, level: float = LEVEL
) -> tuple[float, float]:
    """The bootstrap percentile interval (low, high) of a score of test samples.

    `score`: maps predictions (n, …) and labels (n, …) to one number. Samples are drawn with replacement RESAMPLES
    times (Efron 1979); draws for which the score is NaN (such as an AUC of one class) are left out. (NaN, NaN) without
    samples, or if more than half of the draws have no score. The result depends only on the arguments. Raises UserError
    for a level that is not between 0 and 1, and for predictions and labels of different length.

    >>> import torch
    >>> from fewbytes.core.intervals import interval
    >>> labels = torch.tensor([0, 1] * 50)
    >>> predictions = torch.where(torch.arange(100) < 80, labels, 1 - labels)
    >>> low, high = interval(lambda guessed, true: (guessed == true).float().mean(), predictions, labels, seed=1)
    >>> low < 0.8 < high, low > 0.7, high < 0.9
    (True, True, True)
    """
    if not 0 < level < 1:
        raise UserError(f"the level of an interval lies between 0 and 1, not {level}")
    if len(predictions) != len(labels):
        raise UserError(f"there are {len(predictions)} predictions for {len(labels)} labels: give one for each")
    if not len(labels):
        return math.nan, math.nan
    rng = stream(seed, "bootstrap")
    found = []
    for _ in range(RESAMPLES):
        rows = torch.from_numpy(rng.integers(len(labels), size=len(labels)))
        found.append(float(score(predictions[rows], labels[rows])))
    defined = np.array([value for value in found if not math.isnan(value)])
    if len(defined) < RESAMPLES / 2:
        return math.nan, math.nan
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
