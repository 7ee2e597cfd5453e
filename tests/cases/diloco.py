"""Cases of DiLoCo, and what their clients send and receive."""

from __future__ import annotations

from costs import CONV, HEAD, MODEL, NORM, STATISTICS, Cost, Exchange, every

import fewbytes as fb

OWN = {"steps": 4, "lr": 0.01, "batch": 8, "server_momentum": 0.5}
CASES = {
    "diloco": fb.DiLoCo(**OWN),
    "diloco-fragments": fb.DiLoCo(**OWN, fragments=2),
    "diloco-sampled": fb.DiLoCo(**OWN, fragments=2, fraction=0.75),
}


def in_turn(exchange: Exchange) -> Cost:
    """Of three layers the first and the last, then the second."""
    return Cost(up=CONV + HEAD if exchange.round % 2 else NORM + STATISTICS, down=MODEL)


COSTS = {
    "diloco": every(MODEL, MODEL),
    "diloco-fragments": in_turn,
    "diloco-sampled": in_turn,
}
