"""Cases of FedCAMS, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, STATISTICS, D, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedcams": fb.FedCAMS(**LOCAL, fraction=0.5),
}
COSTS = {
    "fedcams": every(4 + STATISTICS, MODEL, D),
}
