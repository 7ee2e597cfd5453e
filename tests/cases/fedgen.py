"""Cases of FedGen, and what their clients send and receive."""

from __future__ import annotations

from costs import CLASSES, FEATURES, HEAD, Cost, Exchange, waiting

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedgen": fb.FedGen(**LOCAL, server_steps=3, hidden=8),
}


def fedgen(exchange: Exchange) -> Cost:
    if exchange.handler == "count":
        return Cost(up=4 * CLASSES)
    noise, hidden = 32, 8
    generator = (noise + CLASSES + 3) * hidden + (hidden + 1) * FEATURES
    return waiting(HEAD, HEAD + 4 * (generator + CLASSES), HEAD)(exchange)


COSTS = {
    "fedgen": fedgen,
}
