"""Cases of LG_FedAvg, and what their clients send and receive."""

from __future__ import annotations

from costs import HEAD, waiting

import fewbytes as fb
from cases import LOCAL

CASES = {
    "lg_fedavg": fb.LG_FedAvg(**LOCAL, fraction=0.5),
}
COSTS = {
    "lg_fedavg": waiting(HEAD, HEAD, HEAD),
}
