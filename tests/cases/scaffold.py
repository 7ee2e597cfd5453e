"""Cases of SCAFFOLD, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, D, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "scaffold": fb.SCAFFOLD(**LOCAL),
    "scaffold-sampled": fb.SCAFFOLD(**LOCAL, server_lr=0.8, fraction=0.5),
}
COSTS = {
    "scaffold": every(MODEL + 4 * D, MODEL + 4 * D),
    "scaffold-sampled": every(MODEL + 4 * D, MODEL + 4 * D),
}
