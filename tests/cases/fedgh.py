"""Cases of FedGH, and what their clients send and receive."""

from __future__ import annotations

from costs import CLASSES, FEATURES, HEAD, waiting

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedgh": fb.FedGH(**LOCAL),
}
COSTS = {
    "fedgh": waiting(4 * FEATURES * CLASSES, HEAD, HEAD),
}
