"""Cases of GeneFL, and what their clients send and receive."""

from __future__ import annotations

from costs import CONV, HEAD, Cost, Exchange, described, every

import fewbytes as fb
from cases import CLUSTERS, LOCAL

GENE = {**CLUSTERS, "fraction": 0.75}
CASES = {
    "genefl": fb.GeneFL(**LOCAL, **GENE, gamma=1),
    "genefl-ablated": fb.GeneFL(
        **LOCAL,
        **GENE,
        similarity="vectors",
        inherit="nothing",
        gamma_step=0,
        score="emd",
        order="ascending",
        norm="per_tensor_sum",
        normalise="per_tensor",
        elastic="target",
        elastic_step="split",
        fisher="model",
        fisher_samples=6,
        classifier="own",
    ),
}


def genefl(exchange: Exchange) -> Cost:
    layers = CONV + HEAD
    return Cost(layers if exchange.round == 1 else {CONV, HEAD, layers}, down=layers)


COSTS = {
    "genefl": described(genefl),
    "genefl-ablated": described(every(CONV, CONV)),
}
