"""Numbers in a column that seem to stand for a missing value, such as -999."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MARKS = sorted(
    {9, *(-int(d * n) for d in "789" for n in range(1, 9)), *(int(d * n) for d in "789" for n in range(2, 9))}
)
"""Numbers that often stand for a missing value."""
APART, ALONE = 2, 5  # minimum distance of a mark from other values, in ranges of these (at least 1); of a single mark
VARIED = 5  # minimum number of different values for a mark above them
LARGE = 77  # a negative number of this size is a mark even if it occurs once


def far_marks(values: NDArray[np.float64], marks: Sequence[int], usual: tuple[float, float] | None = None) -> list[int]:
    """The `marks` in a column that seem to mean missing values: repeated and far from all others, single and very far,
    or the only negative values. No mark lies above other values that are few or mostly equal, as counts and pixels are.
    Values between the two of `usual` are not marks."""
    there = np.isin(values, marks)
    others = values[~there & ~np.isnan(values)]
    if not len(others):
        return []
    low, high = float(others.min()), float(others.max())
    if usual is not None:
        low, high = min(low, usual[0]), max(high, usual[1])
    reach = max(high - low, 1)
    different, times = np.unique(others, return_counts=True)
    varied = len(different) >= VARIED and 2 * times.max() <= len(others)

    def stands_apart(v: float, count: int) -> bool:
        if v < 0 <= low and (count > 1 or v <= -LARGE):
            return True
        return (varied or v < 0) and max(low - v, v - high) > (APART if count > 1 else ALONE) * reach

    found = zip(*np.unique(values[there], return_counts=True), strict=True)
    return [int(v) for v, count in found if stands_apart(v, count)]
