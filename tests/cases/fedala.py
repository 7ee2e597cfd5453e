"""Cases of FedALA, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedala": fb.FedALA(**LOCAL, first_passes=3),
    "fedala-sampled": fb.FedALA(**LOCAL, layers=2, portion=0.5, settled=0.5, first_passes=12, fraction=0.5),
}
COSTS = {
    "fedala": every(MODEL, MODEL),
    "fedala-sampled": every(MODEL, MODEL),
}
