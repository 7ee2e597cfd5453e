"""Cases of FedKGF, and what their clients send and receive."""

from __future__ import annotations

from typing import Any

from costs import HEAD, NORM, STATISTICS, Formula, every

import fewbytes as fb
from cases import LOCAL

ABLATED: dict[str, Any] = {"sign": False, "alpha": False, "through": False, "init": "uniform1"}

CASES = {
    "fedkgf": fb.FedKGF(**LOCAL, base=2),
    "fedkgf-ablated": fb.FedKGF(**LOCAL, **ABLATED, base=3, owners=2, groups="random", common=True, fraction=0.75),
    "fedkgf-averaged": fb.FedKGF(**LOCAL, base=2, owners=0, momentum=0.5, lr_rounds=2),
}


def fedkgf(base: int, common: bool = False, owned: bool = True) -> Formula:
    """Two groups, the convolution with its normalisation and the classifier, each of which one client sends."""
    kernels, shared = 4 * 9 * base, NORM + STATISTICS
    whole = kernels + shared + HEAD
    if not owned:
        return every(whole, whole)
    return every({shared + HEAD, whole} if common else {0, kernels + shared, HEAD}, whole)


COSTS = {
    "fedkgf": fedkgf(2),
    "fedkgf-ablated": fedkgf(3, common=True),
    "fedkgf-averaged": fedkgf(2, owned=False),
}
