"""Cases of FuseFL, and what their clients send and receive."""

from __future__ import annotations

from costs import CLASSES, CONV, FEATURES, HEAD, NORM, STATISTICS, Cost, Exchange, Formula

import fewbytes as fb
from cases import LOCAL

CASES = {
    "fusefl": fb.FuseFL(blocks=3, ccvr_samples=20, **(LOCAL | {"epochs": 4})),
    "fusefl-average": fb.FuseFL(
        cuts="conv", adaptor="average", final_reduce="mean", ccvr_samples=0, **(LOCAL | {"epochs": 2})
    ),
    "fusefl-moving": fb.FuseFL(
        blocks=2,
        frozen_bn="train_shared",
        final_reduce="concatenate",
        ccvr_samples=20,
        ccvr_covariance="released",
        **(LOCAL | {"epochs": 2}),
    ),
}


def fusefl(blocks: list[int], adaptor: int, finished: int, features: int = 0, moved: int = 0) -> Formula:
    """`blocks`: bytes of each. `adaptor`: bytes of one, none before the first block. `finished`: of the last download.

    `features`: D of the statistics, if any. `moved`: bytes of the statistics that frozen blocks go on with.
    """
    others = 3
    stages = [block + adaptor * (k > 0) for k, block in enumerate(blocks)]

    def cost(exchange: Exchange) -> Cost:
        k = exchange.round - 1
        fused = others * (stages[k - 1] if k else 0) + moved * (k > 0)
        if exchange.handler == "receive":
            return Cost(down=finished)
        if exchange.handler == "statistics":
            return Cost(4 * CLASSES * (features + features * (features + 1) // 2) + 8 * CLASSES, down=fused)
        last = k == len(blocks) - 1
        return Cost(stages[k] + last * HEAD + moved * (k > 0), down=fused)

    return cost


ADAPTOR = 4 * (16 * 4 + 4)  # from the channels of four clients' convolutions to those of one


COSTS = {
    "fusefl": fusefl([CONV, NORM + STATISTICS, 0], ADAPTOR, HEAD, features=FEATURES),
    "fusefl-average": fusefl([CONV, NORM + STATISTICS], 0, 3 * (NORM + STATISTICS) + HEAD),
    "fusefl-moving": fusefl(
        [CONV + NORM + STATISTICS, 0],
        ADAPTOR,
        HEAD + 3 * 4 * FEATURES * CLASSES + 4 * STATISTICS,
        features=4 * FEATURES,
        moved=4 * STATISTICS,
    ),
}
