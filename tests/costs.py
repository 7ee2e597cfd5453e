"""What a client sends and receives, by the formula in each method's docstring, counted by hand from the models' sizes.

Values and mask bits as papers count them: four bytes a value, eight a counter of batch normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

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
