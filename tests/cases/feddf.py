"""Cases of FedDF, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "feddf": fb.FedDF(**LOCAL, server_steps=6, server_batch=8, noise=20),
}
COSTS = {
    "feddf": every(MODEL),
}
