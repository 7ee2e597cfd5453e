"""Cases of FedProto, and what their clients send and receive."""

from __future__ import annotations

from costs import CLASSES, FEATURES, waiting

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedproto": fb.FedProto(**LOCAL),
}
COSTS = {
    "fedproto": waiting(4 * FEATURES * CLASSES, 4 * FEATURES * CLASSES, 4 * FEATURES * CLASSES),
}
