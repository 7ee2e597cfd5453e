"""Cases of FedDistill, and what their clients send and receive."""

from __future__ import annotations

from costs import CLASSES, waiting

import fewbytes as fb
from cases import LOCAL

CASES = {
    "feddistill": fb.FedDistill(**LOCAL),
}
COSTS = {
    "feddistill": waiting(4 * CLASSES * CLASSES, 4 * CLASSES * CLASSES),
}
