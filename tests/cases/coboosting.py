"""Cases of CoBoosting, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "coboosting": fb.CoBoosting(**LOCAL, server_epochs=2, generator_steps=2, server_batch=8, latent=4),
}
COSTS = {
    "coboosting": every(MODEL),
}
