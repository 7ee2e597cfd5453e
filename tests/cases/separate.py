"""Cases of Separate, and what their clients send and receive."""

from __future__ import annotations

from costs import every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "separate": fb.Separate(**LOCAL),
}
COSTS = {
    "separate": every(0),
}
