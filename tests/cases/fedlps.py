"""Cases of FedLPS, and what their clients send and receive."""

from __future__ import annotations

from costs import CLASSIFIER, MODEL, Cost, D, Exchange, described, upto

import fewbytes as fb
from cases import CLUSTERS, SOME

CASES = {
    "fedlps": fb.Clustered(fb.FedLPS(**SOME, ratios="adaptive"), **CLUSTERS),
}


def fedlps(exchange: Exchange) -> Cost:
    entries = D + 2 * 4 + 1  # with statistics and the counter; after the first round the encoder stays as it is
    return Cost(upto(MODEL), entries if exchange.round == 1 else sum(CLASSIFIER), MODEL)


COSTS = {
    "fedlps": described(fedlps),
}
