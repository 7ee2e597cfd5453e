"""Cases of FedAvg, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, D, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fedavg": fb.FedAvg(**LOCAL),
    "fedavg-local-buffers": fb.FedAvg(**LOCAL, buffers="local", fraction=0.5),
    "fedavg-momentum": fb.FedAvg(**LOCAL, server_lr=0.7, server_momentum=0.5, nesterov=True),
}
COSTS = {
    "fedavg": every(MODEL, MODEL),
    "fedavg-local-buffers": every(4 * D, 4 * D),
    "fedavg-momentum": every(MODEL, MODEL),
}
