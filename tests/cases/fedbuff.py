"""Cases of FedBuff, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, Cost, Exchange
from runs import ROUNDS

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedbuff": fb.FedBuff(**LOCAL, concurrency=4, buffer=3),
}


def fedbuff(exchange: Exchange) -> Cost:
    """Who is at work when the last round ends sends nothing."""
    return Cost(up=0 if exchange.round > ROUNDS else MODEL, down=MODEL)


COSTS = {
    "fedbuff": fedbuff,
}
