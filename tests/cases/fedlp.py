"""Cases of FedLP, and what their clients send and receive."""

from __future__ import annotations

from itertools import combinations

from costs import MODEL, TENSORS, Formula, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedlp": fb.FedLP(**LOCAL),
}


def fedlp() -> Formula:
    entries = [4 * n for n in (*TENSORS, 4, 4)] + [8]
    kept = {sum(some) for k in range(len(entries) + 1) for some in combinations(entries, k)}
    return every(kept, MODEL)


COSTS = {
    "fedlp": fedlp(),
}
