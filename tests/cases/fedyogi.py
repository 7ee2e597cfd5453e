"""Cases of FedYogi, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedyogi": fb.FedYogi(**LOCAL, server_lr=0.1, fraction=0.75),
}
COSTS = {
    "fedyogi": every(MODEL, MODEL),
}
