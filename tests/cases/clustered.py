"""Cases of Clustered, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, described, every

import fewbytes as fb
from cases import CLUSTERS, SOME

CASES = {
    "clustered": fb.Clustered(fb.FedAvg(**SOME, received=True), **CLUSTERS),
}
COSTS = {
    "clustered": described(every(MODEL, MODEL)),
}
