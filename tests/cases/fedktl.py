"""Cases of FedKTL, and what their clients send and receive."""

from __future__ import annotations

from costs import CLASSES, FEATURES, SAMPLE, every, waiting

import fewbytes as fb
from cases import LOCAL

KTL = {"generator": "cases:TinyGenerator", "server_epochs": 2, "server_batch": 8}
CASES = {
    "fedktl": fb.FedKTL(**LOCAL, **KTL),
    "fedktl-ablated": fb.FedKTL(
        **LOCAL,
        **KTL,
        fraction=0.5,
        order="shuffled",
        transfer="images",
        centroids="learned",
        bandwidth="median",
        lambda_mse=0.0,
        dimension=5,
        client_noise=0.2,
        server_noise=0.2,
    ),
    "fedktl-linear": fb.FedKTL(**LOCAL, **KTL, classifier="linear", lambda_mmd=0.0, scale=1.0, margin=0.0),
    "fedktl-conditional": fb.FedKTL(
        **LOCAL, **KTL | {"generator": "cases:TinyConditional"}, transfer="conditional", order="shuffled"
    ),
}

PAIRS = CLASSES * 4 * (4 + SAMPLE)  # latent vectors of four numbers, and images, whose pixels papers count as numbers

COSTS = {
    "fedktl": waiting(4 * CLASSES * CLASSES, PAIRS),
    "fedktl-ablated": waiting(4 * 5 * CLASSES, PAIRS),
    "fedktl-linear": waiting(4 * FEATURES * CLASSES, PAIRS),
    "fedktl-conditional": every(0, PAIRS),
}
