"""Cases of FedKD, and what their clients send and receive."""

from __future__ import annotations

from costs import CLASSES, FEATURES, Formula, waiting

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedkd": fb.FedKD(**LOCAL),
}


def fedkd() -> Formula:
    """Of an OwnNet of width 2: two kernels of 3 x 3 cut at one rank, the classifier at another, the rest as it is."""
    kernels, classifier, rest = 2 * (3 + 3 + 1), CLASSES + FEATURES + 1, 2 + 4 + CLASSES
    sizes = {4 * (a * kernels + b * classifier + rest) for a in (1, 2, 3) for b in (1, 2, 3)}
    return waiting(sizes, sizes)


COSTS = {
    "fedkd": fedkd(),
}
