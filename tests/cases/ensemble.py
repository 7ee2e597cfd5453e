"""Cases of Ensemble, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "ensemble": fb.Ensemble(**LOCAL),
}
COSTS = {
    "ensemble": every(MODEL),
}
