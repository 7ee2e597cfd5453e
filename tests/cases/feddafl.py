"""Cases of FedDAFL, and what their clients send and receive."""

from __future__ import annotations

from costs import MODEL, every

import fewbytes as fb
from cases import LOCAL

CASES = {
    "feddafl": fb.FedDAFL(**LOCAL, server_steps=3, student_steps=2, server_batch=8, latent=4),
}
COSTS = {
    "feddafl": every(MODEL),
}
