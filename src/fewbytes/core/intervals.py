"""Intervals: of metrics, by the bootstrap over test samples; of differences, by Student's t over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewbytes.base.errors import UserError
from fewbytes.base.streams import stream

RESAMPLES = 1000
"""Number of resamples of an interval."""
LEVEL = 0.95
"""Share of resamples within an interval."""
T_975 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)
"""The 0.975 quantile of Student's t, for 1 to 30 degrees of freedom."""


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
    found = np.array([float(score(predictions[rows], labels[rows])) for rows in resamples(len(labels), seed)])
    return bounds(found, level)


def resamples(n: int, seed: int) -> Iterator[Tensor]:
    """RESAMPLES draws of n of n samples with replacement, rows (n,); equal for equal arguments, for paired comparisons.

    >>> from fewbytes.core.intervals import resamples
    >>> next(resamples(4, seed=0))
    tensor([1, 0, 1, 2])
    """
    rng = stream(seed, "bootstrap")
    for _ in range(RESAMPLES):
        yield torch.from_numpy(rng.integers(n, size=n))


def bounds(scores: NDArray[np.float64], level: float = LEVEL) -> tuple[float, float]:
    """The interval (low, high) of the scores of resamples, by percentiles, without those that are NaN; (NaN, NaN) if
    these are more than half.

    >>> import numpy as np
    >>> from fewbytes.core.intervals import bounds
    >>> bounds(np.arange(101.0), level=0.5)
    (25.0, 75.0)
    """
    defined = scores[~np.isnan(scores)]
    if len(defined) < len(scores) / 2:
        return math.nan, math.nan
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired(differences: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval (low, high) of the mean of paired differences, by Student's t; (NaN, NaN) for fewer than two.

    `differences`: one for each seed, of two methods on the same clients. With few seeds a bootstrap would be too
    narrow. For more than 31 seeds the quantile is Cornish and Fisher's expansion (within 0.001).

    >>> from fewbytes.core.intervals import paired
    >>> [round(bound, 3) for bound in paired([0.01, 0.02, 0.03])]
    [-0.005, 0.045]
    """
    n = len(differences)
    if n < 2:
        return math.nan, math.nan
    z, freedom = 1.959964, n - 1
    expanded = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    quantile = T_975[freedom - 1] if freedom <= len(T_975) else expanded
    half = quantile * stdev(differences) / math.sqrt(n)
    return fmean(differences) - half, fmean(differences) + half
