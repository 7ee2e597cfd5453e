"""Cases of SmartIdx, and what their clients send and receive."""

from __future__ import annotations

import math

from costs import MODEL, STATISTICS, Cost, D, Formula, upto

import fewbytes as fb
from cases import LOCAL

CASES = {
    "smartidx": fb.SmartIdx(**LOCAL, density=0.2, patterns=3),
}


def smartidx(density: float) -> Formula:
    """A kernel is sent as a whole, nine values for at least five, or by its pattern; there are four."""
    single = math.ceil(density * D)
    return lambda exchange: Cost(upto(4 * (single + 4 * 4) + STATISTICS), upto(24 * single), MODEL)


COSTS = {
    "smartidx": smartidx(0.2),
}
