"""Quality of predictions: metrics by name, torchmetrics' metrics, and known facts about each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fewbytes.base.errors import UserError


class Measure(Protocol):
    """Accumulates predictions and computes a metric of all of them, like torchmetrics' metrics."""

    def update(self, predictions: Tensor, targets: Tensor) -> Any:
        """Add a batch."""

    def compute(self) -> Any:
        """The metric of all added batches, one number."""


@dataclass(frozen=True)
class Metric:
    """A metric: a function that makes its measure, given some predictions; whether higher is better; whether it is a
    share, from 0 to 1; whether that is shown in per cent, as shares of samples are (an AUC is none)."""

    name: str
    make: Callable[[Tensor], Measure] = field(compare=False, repr=False)
    higher: bool = True
    share: bool = True
    percent: bool = field(default=True, compare=False, repr=False)
    known: bool = field(default=False, compare=False, repr=False)  # by name, so that its range is known, too

    @property
    def in_percent(self) -> bool:
        """Whether values are shown in per cent."""
        return self.share and self.percent


Scores = dict[str, tuple[float, int]]
"""By metric: its value times the number of samples (for accuracy: the number of correct ones), and that number."""


GREATEST = 1e100  # maximum magnitude of untrusted measurements, so that their sums stay finite
MOST_SAMPLES = 1 << 48  # maximum untrusted number of samples


def values(scores: Scores) -> dict[str, float]:
    """The value of each metric."""
    return {name: total / n for name, (total, n) in scores.items() if n}


def value_of(measure: Measure) -> float:
    """A measure's result as a number. Raises UserError for several numbers."""
    computed = measure.compute()
    if isinstance(computed, Tensor) and computed.numel() != 1:
        raise UserError(f"{type(measure).__name__} gives {computed.numel()} numbers, not one: give it an average")
    return float(computed)


def possible(scores: Scores, metrics: Sequence[Metric]) -> Scores:
    """The valid ones among untrusted scores, in the metrics' order: numbers, and shares from 0 to 1 (up to float32's
    rounding)."""
    return {
        metric.name: (total, n)
        for metric in metrics
        for total, n in [scores.get(metric.name, (0.0, 0))]
        if 0 < n < MOST_SAMPLES and abs(total) <= n * GREATEST and (not metric.share or 0 <= total <= n * (1 + 1e-6))
    }
