"""How good predictions are: metrics by name, those of torchmetrics, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fewbytes.base.errors import UserError


class Measure(Protocol):
    """What gathers predictions and tells how good they are together: torchmetrics' metrics are such."""

    def update(self, predictions: Tensor, targets: Tensor) -> Any:
        """Take a batch in."""

    def compute(self) -> Any:
        """The metric of all that was taken in, one number."""


@dataclass(frozen=True)
class Metric:
    """A metric: what makes its measure, given some predictions; whether more is better; whether it is a share (0..1,
    shown in per cent)."""

    name: str
    make: Callable[[Tensor], Measure] = field(compare=False, repr=False)
    higher: bool = True
    share: bool = True
    known: bool = field(default=False, compare=False, repr=False)  # by its name, so that what it takes is known, too


Scores = dict[str, tuple[float, int]]
"""By metric: its value times the number of samples, and that number. Of accuracy the former counts what is right."""


GREATEST = 1e100  # magnitude of what somebody else measured: sums of such numbers stay finite
MOST_SAMPLES = 1 << 48  # that somebody else may say there are


def values(scores: Scores) -> dict[str, float]:
    """By metric its value."""
    return {name: total / n for name, (total, n) in scores.items() if n}


def value_of(measure: Measure) -> float:
    """What a measure computes, as a number. Raises UserError for several."""
    computed = measure.compute()
    if isinstance(computed, Tensor) and computed.numel() != 1:
        raise UserError(f"{type(measure).__name__} gives {computed.numel()} numbers, not one: give it an average")
    return float(computed)


def possible(scores: Scores, metrics: Sequence[Metric]) -> Scores:
    """Those of the scores somebody states that can be, in the metrics' order: numbers, shares from 0 to 1 (or as much
    more as float32 rounds)."""
    return {
        metric.name: (total, n)
        for metric in metrics
        for total, n in [scores.get(metric.name, (0.0, 0))]
        if 0 < n < MOST_SAMPLES and abs(total) <= n * GREATEST and (not metric.share or 0 <= total <= n * (1 + 1e-6))
    }
