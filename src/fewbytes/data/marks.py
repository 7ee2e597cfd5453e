"""Numbers in a column that seem to stand for a missing value, such as -999."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MARKS = sorted(
    {9, *(-int(d * n) for d in "789" for n in range(1, 9)), *(int(d * n) for d in "789" for n in range(2, 9))}
)
"""Numbers that often stand for a missing value."""
APART, ALONE = 2, 5  # times the range of all other values, and 1 at least, of such a number from them; of a single one
VARIED = 5  # different values at least, of which one above them is apart
LARGE = 77  # a number below zero, of which once is enough


def far_marks(values: NDArray[np.float64], marks: Sequence[int], usual: tuple[float, float] | None = None) -> list[int]:
    """Those of the `marks` in a column that seem to stand for a missing value: several times there and apart from all
    others, once and very far, or the only ones below zero; none above others that are few, or mostly equal, as counts
    and pixels are. `usual`: values between these are none, either."""
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
