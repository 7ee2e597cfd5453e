"""Handlers' measurements for people: they travel beside the payload, uncounted, and do not affect training."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import msgspec
import numpy as np

from fewbytes.base.errors import MethodError
from fewbytes.core.metrics import GREATEST, Metric, Scores, possible

T = TypeVar("T")
SIGNS = " _.,:+*/()@#%=-"
NAME = re.compile(rf"\w[\w{re.escape(SIGNS)}]{{0,63}}")
"""Valid names of measurements: untrusted names reach terminals, reports and tables."""
MOST_NAMES = 64  # scores, losses or measures of one client's step
ByMetric = dict[str, dict[str, float]]
"""Scores by metric, such as accuracy, then by kind, such as personalised."""


class Records(msgspec.Struct, array_like=True):
    """Measurements of one client's handler, by name."""

    scores: dict[str, Scores] = {}  # by kind, such as personalised
    losses: dict[str, float] = {}
    measures: dict[str, float] = {}
    steps: int = 0  # of local training, in a run with a round time

    def check(self) -> None:
        """Raises MethodError for measurements that a server would ignore: invalid names, or more than MOST_NAMES."""
        for measured in (self.scores, self.losses, self.measures):
            for name in measured:
                if not NAME.fullmatch(name):
                    raise MethodError(f"it measures {name!r}: names are letters and digits, up to 64, and {SIGNS!r}")
            if len(measured) > MOST_NAMES:
                raise MethodError(f"it measures {len(measured)} things, more than {MOST_NAMES} of one sort")


@dataclass
class Gathered:
    """Measurements of all clients' handlers in a step, by name, by client; scores of these metrics."""

    metrics: Sequence[Metric]
    scores: dict[str, dict[int, Scores]] = field(default_factory=dict)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    measures: dict[str, dict[int, float]] = field(default_factory=dict)

    def add(self, client: int, records: Records) -> None:
        """Add a client's measurements; of equal names the last counts. Ignores invalid names and scores, which only an
        untrusted node sends."""
        scores = {kind: possible(of, self.metrics) for kind, of in _plain(records.scores).items()}
        _add(self.scores, client, scores)
        for gathered, measured in ((self.losses, records.losses), (self.measures, records.measures)):
            valid = {name: value for name, value in _plain(measured).items() if not GREATEST < abs(value) < math.inf}
            _add(gathered, client, valid)

    def means(self) -> ByMetric:
        """By metric and kind, the mean over the scored clients."""
        return mean_scores(self.scores)

    def pooled(self) -> ByMetric:
        """By metric and kind, the mean over all clients' samples; for accuracy, that of all samples together."""
        return pooled_scores(self.scores)

    def not_finite(self) -> list[str]:
        """Names of measurements that are not finite for some client."""
        parts = (("loss", self.losses), ("measured", self.measures))
        return [f"{part}.{name}" for part, all_of in parts for name, of in all_of.items() if not _finite(of)]

    def not_finite_of(self) -> list[int]:
        """Clients with a non-finite measurement, in ascending order."""
        every = [of for all_of in (self.losses, self.measures) for of in all_of.values()]
        return sorted({client for of in every for client, value in of.items() if not math.isfinite(value)})


def mean_scores(scores: Mapping[str, Mapping[int, Scores]]) -> ByMetric:
    """By metric and kind the mean over clients."""
    return _by_metric(scores, lambda pairs: float(np.mean([total / n for total, n in pairs])))


def pooled_scores(scores: Mapping[str, Mapping[int, Scores]]) -> ByMetric:
    """By metric and kind the mean over clients' samples."""
    return _by_metric(scores, lambda pairs: sum(total for total, _ in pairs) / sum(n for _, n in pairs))


def _by_metric(scores: Mapping[str, Mapping[int, Scores]], one: Callable[[list[tuple[float, int]]], float]) -> ByMetric:
    found: dict[str, dict[str, list[tuple[float, int]]]] = {}
    for kind, of in scores.items():
        for client in sorted(of):
            for metric, pair in of[client].items():
                found.setdefault(metric, {}).setdefault(kind, []).append(pair)
    return {metric: {kind: one(pairs) for kind, pairs in kinds.items()} for metric, kinds in found.items()}


def means(values: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """By name, the mean over clients in ascending order; left out if one is not finite."""
    return {name: float(np.mean([of[i] for i in sorted(of)])) for name, of in values.items() if _finite(of)}


def _plain(measured: Mapping[str, T]) -> dict[str, T]:
    """The measurements with valid names, at most MOST_NAMES."""
    return dict(islice(((name, value) for name, value in measured.items() if NAME.fullmatch(name)), MOST_NAMES))


def _finite(values: Mapping[int, float]) -> bool:
    return all(map(math.isfinite, values.values()))


def _add(gathered: dict[str, dict[int, T]], client: int, new: Mapping[str, T]) -> None:
    for name, value in new.items():
        gathered.setdefault(name, {})[client] = value
