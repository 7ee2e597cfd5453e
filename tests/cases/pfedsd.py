"""Cases of PFedSD, and what their clients send and receive."""

from __future__ import annotations

from costs import D, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "pfedsd": fb.PFedSD(**LOCAL),
    "pfedsd-sampled": fb.PFedSD(**LOCAL, fraction=0.5, teacher="eval"),
}
COSTS = {
    "pfedsd": every(4 * D, 4 * D),
    "pfedsd-sampled": every(4 * D, 4 * D),
}
