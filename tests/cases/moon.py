"""Cases of MOON, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "moon": fb.MOON(**LOCAL, momentum=0.0),
    "moon-sampled": fb.MOON(**LOCAL, mu=5.0, fraction=0.5),
}
COSTS = {
    "moon": every(MODEL, MODEL),
    "moon-sampled": every(MODEL, MODEL),
}
