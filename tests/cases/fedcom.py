"""Cases of FedCOM, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, STATISTICS, D, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedcom": fb.FedCOM(**LOCAL),
    "fedcom-gate": fb.FedCOM(**LOCAL, bits=8, gate=True, gamma=0.9, fraction=0.5, lr_rounds=5),
}
COSTS = {
    "fedcom": every(2 * D + STATISTICS, MODEL),
    "fedcom-gate": every(D + STATISTICS, MODEL),
}
