"""Cases of GeneFL, and what their clients send and receive."""

from __future__ import annotations

from costs import CONV, HEAD, MODEL, Cost, Exchange, described, every

import fewbytes as fb
from cases import CLUSTERS, LOCAL

GENE = {**CLUSTERS, "fraction": 0.75}
CASES = {
    "genefl": fb.GeneFL(**LOCAL, **GENE, gamma=1),
    "genefl-batch-norm": fb.GeneFL(
        **LOCAL, **GENE, gamma=1, gamma_step=1.0, batch_norm="layer", grouping="hierarchical"
    ),
    "genefl-ablated": fb.GeneFL(
        **LOCAL,
        **GENE,
        similarity="vectors",
        start_from="own",
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


def with_batch_norm(exchange: Exchange) -> Cost:
    return Cost(MODEL if exchange.round == 1 else {MODEL - HEAD, HEAD, MODEL}, down=MODEL)


COSTS = {
    "genefl": described(genefl),
    "genefl-batch-norm": described(with_batch_norm),
    "genefl-ablated": described(every(CONV, CONV)),
}
