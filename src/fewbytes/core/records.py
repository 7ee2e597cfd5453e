"""What handlers measure for people: it travels beside the payload, uncounted, and steers nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np

T = TypeVar("T")


class Records(msgspec.Struct, array_like=True):
    """What one client's handler measured, by name."""

    scores: dict[str, tuple[int, int]] = {}  # by kind of accuracy: how many predictions were right, of how many
    losses: dict[str, float] = {}
    measures: dict[str, float] = {}


@dataclass
class Gathered:
    """What all clients' handlers measured in a step of a run: by name, by client."""

    scores: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    measures: dict[str, dict[int, float]] = field(default_factory=dict)

    def add(self, client: int, records: Records) -> None:
        """Add what a client's handler measured; of a name it measured before, the last counts. Scores that cannot be,
        which only a stranger's node sends, are passed over."""
        _add(self.scores, client, {kind: (c, n) for kind, (c, n) in records.scores.items() if 0 <= c <= n and n})
        _add(self.losses, client, records.losses)
        _add(self.measures, client, records.measures)

    def accuracies(self) -> dict[str, float]:
        """By kind, the mean over the clients that were scored."""
        return means({kind: {i: c / n for i, (c, n) in of.items()} for kind, of in self.scores.items()})

    def pooled(self) -> dict[str, float]:
        """By kind, the accuracy over all clients' samples together."""
        return {
            kind: sum(c for c, _ in of.values()) / sum(n for _, n in of.values()) for kind, of in self.scores.items()
        }

    def not_finite(self) -> list[str]:
        """The names of what some client measured as no finite number."""
        parts = (("loss", self.losses), ("measured", self.measures))
        return [f"{part}.{name}" for part, all_of in parts for name, of in all_of.items() if not _finite(of)]


def means(values: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """By name, the mean over clients in ascending order; none where one is not finite."""
    return {name: float(np.mean([of[i] for i in sorted(of)])) for name, of in values.items() if _finite(of)}


def _finite(values: Mapping[int, float]) -> bool:
    return all(map(math.isfinite, values.values()))


def _add(gathered: dict[str, dict[int, T]], client: int, new: Mapping[str, T]) -> None:
    for name, value in new.items():
        gathered.setdefault(name, {})[client] = value
