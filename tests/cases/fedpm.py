"""Cases of FedPM, and what their clients send and receive."""

from __future__ import annotations

from costs import CLASSIFIER, CONVOLUTION, STATISTICS, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedpm": fb.FedPM(**LOCAL),
    "fedpm-sampled": fb.FedPM(**LOCAL, fraction=0.5, scored="sampled", lr_rounds=5),
}

MASKED = CONVOLUTION[0] + CLASSIFIER[0]  # values of FedPM's mask

COSTS = {
    "fedpm": every(STATISTICS, 4 * MASKED + STATISTICS, MASKED),
    "fedpm-sampled": every(STATISTICS, 4 * MASKED + STATISTICS, MASKED),
}
