"""Cases of FedPURIN, and what their clients send and receive."""

from __future__ import annotations

from collections.abc import Collection

from costs import CLASSIFIER, CONVOLUTION, TENSORS, Cost, Exchange, Formula, largest, upto

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedpurin": fb.FedPURIN(**LOCAL, beta=2),
    "fedpurin-sampled": fb.FedPURIN(
        **LOCAL, beta=2, fraction=0.5, gradient="delta", hessian=True, tau=0.3, activations=True
    ),
    "fedpurin-batch-norm": fb.FedPURIN(**LOCAL, batch_norm="selected", weighted=True),
}


def fedpurin(tau: float, beta: int, tensors: Collection[int]) -> Formula:
    d, most = sum(tensors), 4 * largest(tau, tensors)

    def cost(exchange: Exchange) -> Cost:
        first, receive = exchange.before is None, exchange.handler == "receive"
        down = 0 if first else upto(4 * d - (exchange.sent if exchange.before > beta else 0))
        up = most if first else upto(most)  # values that are zero by then are not critical
        return Cost(0 if receive else up, 0 if receive else d, down, 0 if first else d)

    return cost


SCORED = CONVOLUTION + CLASSIFIER  # what takes part in FedPURIN


COSTS = {
    "fedpurin": fedpurin(0.5, 2, SCORED),
    "fedpurin-sampled": fedpurin(0.3, 2, SCORED),
    "fedpurin-batch-norm": fedpurin(0.5, 100, TENSORS),
}
