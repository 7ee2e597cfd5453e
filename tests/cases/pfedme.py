"""Cases of pFedMe, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "pfedme": fb.PFedMe(**LOCAL, steps=4, lambda_near=5.0, personal_lr=0.1),
    "pfedme-sampled": fb.PFedMe(
        **LOCAL | {"epochs": 2}, steps=0, lambda_near=5.0, beta=1.5, personal_steps=2, momentum=0.5, fraction=0.75
    ),
}
COSTS = {
    "pfedme": every(MODEL, MODEL),
    "pfedme-sampled": every(MODEL, MODEL),
}
