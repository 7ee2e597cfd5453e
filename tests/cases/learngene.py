"""Cases of Learngene, and what their clients send and receive."""

from __future__ import annotations

from costs import CONV, described, every

import fewbytes as fb
from cases import CLUSTERS, SOME

CASES = {
    "learngene": fb.Clustered(fb.Learngene(**SOME, select="updates", select_rounds=2), **CLUSTERS),
}
COSTS = {
    "learngene": described(every(CONV, CONV)),
}
