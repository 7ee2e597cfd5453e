"""Cases of FedNova, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fednova": fb.FedNova(**LOCAL, momentum=0.5, fraction=0.75),
    "fednova-proximal": fb.FedNova(**LOCAL | {"epochs": 2}, mu=0.1),
}
COSTS = {
    "fednova": every(MODEL, MODEL),
    "fednova-proximal": every(MODEL, MODEL),
}
