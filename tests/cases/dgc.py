"""Cases of DGC, and what their clients send and receive."""

from __future__ import annotations

import math

from costs import CLASSIFIER, CONVOLUTION, MODEL, STATISTICS, TENSORS, Cost, Exchange, Formula, largest

import fewbytes as fb
from cases import LOCAL

CASES = {
    "dgc": fb.DGC(**LOCAL),
    "dgc-ablated": fb.DGC(**LOCAL, fraction=0.5, density=0.1, warmup=2, momentum=0.5, norm=3.0, lr_rounds=3),
}


def dgc(density: float, warmup: int = 0) -> Formula:
    vectors = [n for n in TENSORS if n < 5]

    def cost(exchange: Exchange) -> Cost:
        now = density ** min(1, exchange.round / (warmup + 1))
        chosen = largest(now, [CONVOLUTION[0], CLASSIFIER[0]], math.ceil) + sum(vectors)
        return Cost(4 * chosen + STATISTICS, 24 * chosen, MODEL)

    return cost


COSTS = {
    "dgc": dgc(1 / 32),
    "dgc-ablated": dgc(0.1, warmup=2),
}
