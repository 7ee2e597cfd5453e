"""What a client sends and receives, by the formula in each method's docstring, counted by hand from the models' sizes.

Values and mask bits as papers count them: four bytes a value, eight a counter of batch normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import combinations

CONVOLUTION, NORMALISATION, CLASSIFIER = [4 * 9], [4, 4], [64 * 3, 3]  # of a TinyNet; an OwnNet has the same classifier
TENSORS = CONVOLUTION + NORMALISATION + CLASSIFIER
D = sum(TENSORS)
STATISTICS = 4 * (4 + 4) + 8  # bytes: means, variances and a counter
MODEL = 4 * D + STATISTICS
CONV, NORM, HEAD = 4 * sum(CONVOLUTION), 4 * sum(NORMALISATION), 4 * sum(CLASSIFIER)  # bytes
FEATURES, CLASSES, SAMPLE = 64, 3, 16  # a sample is an image of 4 x 4


@dataclass(frozen=True)
class Exchange:
    """One line of the ledger, and what its client's line before it was."""

    round: int
    handler: str
    client: int
    before: int | None  # the round of the client's exchange before, None if this is its first
    sent: int  # bytes of values it sent then


@dataclass(frozen=True)
class Cost:
    """Bytes of values and bits of masks, each one number or all that are possible."""

    up: int | Collection[int] = 0
    up_bits: int | Collection[int] = 0
    down: int | Collection[int] = 0
    down_bits: int | Collection[int] = 0


Formula = Callable[[Exchange], Cost]


def upto(most: int) -> range:
    return range(0, most + 1, 4)


def largest(share: float, tensors: Collection[int], rounding: Callable[[float], int] = math.floor) -> int:
    """How many values are a share of each tensor."""
    return sum(rounding(share * n) for n in tensors)


def every(up: int | Collection[int], down: int = 0, up_bits: int = 0) -> Formula:
    """The same in every exchange."""
    return lambda exchange: Cost(up, up_bits, down)


def waiting(up: int | Collection[int], down: int | Collection[int], last: int = 0) -> Formula:
    """What the server made of a round comes with the next one's request; after the last round, `last` of it alone."""

    def cost(exchange: Exchange) -> Cost:
        if exchange.handler == "receive":
            return Cost(down=last)
        return Cost(up, down=down if exchange.round > 1 else 0)

    return cost


def described(formula: Formula) -> Formula:
    """Two vectors of a sample's length before the first round, by which clients are clustered."""
    return lambda exchange: Cost(up=4 * 2 * SAMPLE) if exchange.handler == "describe" else formula(exchange)


def fedpurin(tau: float, beta: int, tensors: Collection[int]) -> Formula:
    d, most = sum(tensors), 4 * largest(tau, tensors)

    def cost(exchange: Exchange) -> Cost:
        first, receive = exchange.before is None, exchange.handler == "receive"
        down = 0 if first else upto(4 * d - (exchange.sent if exchange.before > beta else 0))
        up = most if first else upto(most)  # values that are zero by then are not critical
        return Cost(0 if receive else up, 0 if receive else d, down, 0 if first else d)

    return cost


def fedcac(tau: float, beta: int) -> Formula:
    outside = 4 * (D - largest(tau, TENSORS))

    def cost(exchange: Exchange) -> Cost:
        down = 0 if exchange.before is None else 4 * D if exchange.before <= beta else outside
        return Cost(down=down) if exchange.handler == "receive" else Cost(4 * D, D, down)

    return cost


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


def fedkgf(base: int, common: bool = False, owned: bool = True) -> Formula:
    """Two groups, the convolution with its normalisation and the classifier, each of which one client sends."""
    kernels, shared = 4 * 9 * base, NORM + STATISTICS
    whole = kernels + shared + HEAD
    if not owned:
        return every(whole, whole)
    return every({shared + HEAD, whole} if common else {0, kernels + shared, HEAD}, whole)


def genefl(exchange: Exchange) -> Cost:
    layers = CONV + HEAD
    return Cost(layers if exchange.round == 1 else {CONV, HEAD, layers}, down=layers)


def fedlps(exchange: Exchange) -> Cost:
    entries = D + 2 * 4 + 1  # with statistics and the counter; after the first round the encoder stays as it is
    return Cost(upto(MODEL), entries if exchange.round == 1 else sum(CLASSIFIER), MODEL)


def fedlp() -> Formula:
    entries = [4 * n for n in (*TENSORS, 4, 4)] + [8]
    kept = {sum(some) for k in range(len(entries) + 1) for some in combinations(entries, k)}
    return every(kept, MODEL)


def fedgen(exchange: Exchange) -> Cost:
    if exchange.handler == "count":
        return Cost(up=4 * CLASSES)
    noise, hidden = 32, 8
    generator = (noise + CLASSES + 3) * hidden + (hidden + 1) * FEATURES
    return waiting(HEAD, HEAD + 4 * (generator + CLASSES), HEAD)(exchange)


def dgc(density: float, warmup: int = 0) -> Formula:
    vectors = [n for n in TENSORS if n < 5]

    def cost(exchange: Exchange) -> Cost:
        now = density ** min(1, exchange.round / (warmup + 1))
        chosen = largest(now, [CONVOLUTION[0], CLASSIFIER[0]], math.ceil) + sum(vectors)
        return Cost(4 * chosen + STATISTICS, 24 * chosen, MODEL)

    return cost


def smartidx(density: float) -> Formula:
    """A kernel is sent as a whole, nine values for at least five, or by its pattern; there are four."""
    single = math.ceil(density * D)
    return lambda exchange: Cost(upto(4 * (single + 4 * 4) + STATISTICS), upto(24 * single), MODEL)


def fedkd() -> Formula:
    """Of an OwnNet of width 2: two kernels of 3 x 3 cut at one rank, the classifier at another, the rest as it is."""
    kernels, classifier, rest = 2 * (3 + 3 + 1), CLASSES + FEATURES + 1, 2 + 4 + CLASSES
    sizes = {4 * (a * kernels + b * classifier + rest) for a in (1, 2, 3) for b in (1, 2, 3)}
    return waiting(sizes, sizes)


AUXILIARY = 4 * (9 * 2 + 2 + 2 * 2) + HEAD  # an OwnNet of width 2, that of client 0
PAIRS = CLASSES * 4 * (4 + SAMPLE)  # latent vectors of four numbers, and images, whose pixels papers count as numbers
ADAPTOR = 4 * (16 * 4 + 4)  # from the channels of four clients' convolutions to those of one
MASKED = CONVOLUTION[0] + CLASSIFIER[0]  # values of FedPM's mask
SCORED = CONVOLUTION + CLASSIFIER  # what takes part in FedPURIN

COSTS: dict[str, Formula] = {
    "fedavg": every(MODEL, MODEL),
    "fedavg-local-buffers": every(4 * D, 4 * D),
    "separate": every(0),
    "fedktl": waiting(4 * CLASSES * CLASSES, PAIRS),
    "fedktl-ablated": waiting(4 * 5 * CLASSES, PAIRS),
    "fedktl-linear": waiting(4 * FEATURES * CLASSES, PAIRS),
    "fedpurin": fedpurin(0.5, 2, SCORED),
    "fedpurin-sampled": fedpurin(0.3, 2, SCORED),
    "fedpurin-batch-norm": fedpurin(0.5, 100, TENSORS),
    "fusefl": fusefl([CONV, NORM + STATISTICS, 0], ADAPTOR, HEAD, features=FEATURES),
    "fusefl-average": fusefl([CONV, NORM + STATISTICS], 0, 3 * (NORM + STATISTICS) + HEAD),
    "fusefl-moving": fusefl(
        [CONV + NORM + STATISTICS, 0], ADAPTOR, HEAD + 3 * 4 * FEATURES * CLASSES + 4 * STATISTICS,
        features=4 * FEATURES, moved=4 * STATISTICS,
    ),
    "ensemble": every(MODEL),
    "feddf": every(MODEL),
    "dense": every(MODEL),
    "feddafl": every(MODEL),
    "fedadi": every(MODEL),
    "fedkgf": fedkgf(2),
    "fedkgf-ablated": fedkgf(3, common=True),
    "fedkgf-averaged": fedkgf(2, owned=False),
    "fedper": every(CONV + NORM, CONV + NORM),
    "pfedsd": every(4 * D, 4 * D),
    "pfedsd-sampled": every(4 * D, 4 * D),
    "fedcac": fedcac(0.5, 2),
    "fedcac-sampled": fedcac(0.3, 2),
    "lg_fedavg": waiting(HEAD, HEAD, HEAD),
    "fedproto": waiting(4 * FEATURES * CLASSES, 4 * FEATURES * CLASSES, 4 * FEATURES * CLASSES),
    "feddistill": waiting(4 * CLASSES * CLASSES, 4 * CLASSES * CLASSES),
    "fml": waiting(AUXILIARY, AUXILIARY),
    "fedkd": fedkd(),
    "fedgh": waiting(4 * FEATURES * CLASSES, HEAD, HEAD),
    "fedgen": fedgen,
    "genefl": described(genefl),
    "genefl-ablated": described(every(CONV, CONV)),
    "clustered": described(every(MODEL, MODEL)),
    "fedbn": every(CONV + HEAD, CONV + HEAD),
    "partialfed": every(CONV, CONV),
    "fedfina": described(every(CONV, CONV)),
    "fedlp": fedlp(),
    "fedlps": described(fedlps),
    "fedcom": every(2 * D + STATISTICS, MODEL),  # without the ends of each tensor's range, 8 bytes
    "fedcom-gate": every(D + STATISTICS, MODEL),
    "fedpm": every(STATISTICS, 4 * MASKED + STATISTICS, MASKED),
    "fedpm-sampled": every(STATISTICS, 4 * MASKED + STATISTICS, MASKED),
    "learngene": described(every(CONV, CONV)),
    "dgc": dgc(1 / 32),
    "dgc-ablated": dgc(0.1, warmup=2),
    "fedcams": every(4 + STATISTICS, MODEL, D),
    "smartidx": smartidx(0.2),
}  # fmt: skip
"""By case of CASES."""
