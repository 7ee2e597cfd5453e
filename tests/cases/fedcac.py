"""Cases of FedCAC, and what their clients send and receive."""

from __future__ import annotations

from costs import TENSORS, Cost, D, Exchange, Formula, largest

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedcac": fb.FedCAC(**LOCAL, beta=2),
    "fedcac-sampled": fb.FedCAC(**LOCAL, beta=2, fraction=0.5, tau=0.3),
}


def fedcac(tau: float, beta: int) -> Formula:
    outside = 4 * (D - largest(tau, TENSORS))

    def cost(exchange: Exchange) -> Cost:
        down = 0 if exchange.before is None else 4 * D if exchange.before <= beta else outside
        return Cost(down=down) if exchange.handler == "receive" else Cost(4 * D, D, down)

    return cost


COSTS = {
    "fedcac": fedcac(0.5, 2),
    "fedcac-sampled": fedcac(0.3, 2),
}
