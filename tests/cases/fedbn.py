"""Cases of FedBN, and what their clients send and receive."""

from __future__ import annotations

from costs import CONV, HEAD, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedbn": fb.FedBN(**LOCAL),
}
COSTS = {
    "fedbn": every(CONV + HEAD, CONV + HEAD),
}
