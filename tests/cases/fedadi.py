"""Cases of FedADI, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedadi": fb.FedADI(**LOCAL, server_epochs=2, pixel_steps=2, server_steps=2, server_batch=8),
}
COSTS = {
    "fedadi": every(MODEL),
}
