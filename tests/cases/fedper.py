"""Cases of FedPer, and what their clients send and receive."""

from __future__ import annotations

from costs import CONV, NORM, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedper": fb.FedPer(**LOCAL, fraction=0.5),
}
COSTS = {
    "fedper": every(CONV + NORM, CONV + NORM),
}
