"""Cases of FedProx, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedprox": fb.FedProx(**LOCAL, mu=0.1),
    "fedprox-stragglers": fb.FedProx(**LOCAL | {"epochs": 3}, mu=0.1, stragglers=0.5, fraction=0.75),
}
COSTS = {
    "fedprox": every(MODEL, MODEL),
    "fedprox-stragglers": every(MODEL, MODEL),
}
