"""Cases of FedMA, and what their clients send and receive."""

from __future__ import annotations

from costs import CLASSES, Cost, Exchange

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedma": fb.FedMA(layers=2, **(LOCAL | {"epochs": 4})),
}
WIDTHS = range(4, 4 * 4 + 1)  # of the matched convolution, whose clients have 4 channels each


def fedma(exchange: Exchange) -> Cost:
    if exchange.round == 1:
        return Cost(up=4 * 4 * (9 + 1))
    up = {4 * (CLASSES * (16 * width + 1) + CLASSES) for width in WIDTHS}
    return Cost(up, down={4 * (width * (9 + 1) + 4) for width in WIDTHS})


COSTS = {
    "fedma": fedma,
}
