"""Cases of FedFina, and what their clients send and receive."""

from __future__ import annotations

from costs import CONV, described, every

import fewbytes as fb
from cases import CLUSTERS, SOME

CASES = {
    "fedfina": fb.Clustered(fb.FedFina(**SOME, convolutions=1), **CLUSTERS),
}
COSTS = {
    "fedfina": described(every(CONV, CONV)),
}
