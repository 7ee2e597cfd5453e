"""Cases of FML, and what their clients send and receive."""

from __future__ import annotations

from costs import HEAD, waiting

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fml": fb.FML(**LOCAL),
}

AUXILIARY = 4 * (9 * 2 + 2 + 2 * 2) + HEAD  # an OwnNet of width 2, that of client 0

COSTS = {
    "fml": waiting(AUXILIARY, AUXILIARY),
}
