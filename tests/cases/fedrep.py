"""Cases of FedRep, and what their clients send and receive."""

from __future__ import annotations

from costs import CONV, NORM, STATISTICS, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedrep": fb.FedRep(**LOCAL, head_epochs=2, fraction=0.75),
}
COSTS = {
    "fedrep": every(CONV + NORM + STATISTICS, CONV + NORM + STATISTICS),
}
