"""Cases of FedDyn, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "feddyn": fb.FedDyn(**LOCAL, alpha=0.1),
    "feddyn-sampled": fb.FedDyn(**LOCAL | {"epochs": 2}, fraction=0.5),
}
COSTS = {
    "feddyn": every(MODEL, MODEL),
    "feddyn-sampled": every(MODEL, MODEL),
}
