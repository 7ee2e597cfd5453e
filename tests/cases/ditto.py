"""Cases of Ditto, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "ditto": fb.Ditto(**LOCAL),
    "ditto-sampled": fb.Ditto(**LOCAL, personal_epochs=2, fraction=0.5),
}
COSTS = {
    "ditto": every(MODEL, MODEL),
    "ditto-sampled": every(MODEL, MODEL),
}
