"""Cases of PartialFed, and what their clients send and receive."""

from __future__ import annotations

from costs import CONV, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "partialfed": fb.PartialFed(**LOCAL),
}
COSTS = {
    "partialfed": every(CONV, CONV),
}
