"""Early stopping: the condition on scores that ends a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from fewbytes.base.errors import UserError

if TYPE_CHECKING:
    from fewbytes.core.metrics import Metric

TARGET = re.compile(r"(?:([^<>/]+)/)?([^<>=/]+?)\s*(>=|<=)\s*(\S+)")
PATIENCE = re.compile(r"patience\s*=\s*([1-9][0-9]*)", re.ASCII)


@dataclass(frozen=True)
class StopWhen:
    """The condition that ends a run: a target score, or a number of scored rounds without improvement (patience).

    A target names a kind of score, and possibly a metric (default: the first). Patience uses the first metric's score
    of the kind that the method's paper reports, on validation data if some are held out.
    """

    patience: int = 0  # scored rounds; 0: there is a target
    metric: str = ""  # "": the first
    kind: str = ""
    at_least: bool = True
    value: float = 0.0

    @classmethod
    def read(cls, text: str) -> Self:
        """`global>=0.9`, `f1/personalised>=0.8`, `mae/global<=2`, `patience=5`. Raises UserError for anything else.

        >>> from fewbytes.running.stopping import StopWhen
        >>> StopWhen.read("patience=5").patience, str(StopWhen.read("f1/global >= 0.9"))
        (5, 'f1/global>=0.9')
        """
        if waits := PATIENCE.fullmatch(text.strip()):
            return cls(patience=int(waits[1]))
        if (target := TARGET.fullmatch(text.strip())) is not None:
            metric, kind, way, value = target.groups()
            with suppress(ValueError):
                if math.isfinite(float(value)):
                    return cls(0, (metric or "").strip(), kind.strip(), way == ">=", float(value))
        raise UserError(
            "stop_when is a target score, like global>=0.9 or f1/personalised>=0.8 (<= where lower is better), or a "
            f"number of scored rounds without improvement, like patience=5, not {text!r}"
        )

    def __str__(self) -> str:
        if self.patience:
            return f"patience={self.patience}"
        metric = f"{self.metric}/" if self.metric else ""
        return f"{metric}{self.kind}{'>=' if self.at_least else '<='}{self.value}"

    def check(self, metrics: Sequence[Metric]) -> None:
        """Raises UserError if there is no such metric, or it cannot reach that value."""
        known = {metric.name: metric for metric in metrics}
        if not metrics or (self.metric and self.metric not in known):
            there = f"there are {', '.join(known)}" if known else "there are none: give metrics"
            raise UserError(f"stop_when {self}: there is no metric {self.metric!r}; {there}")
        metric = known[self.metric] if self.metric else metrics[0]
        if metric.share and not 0 <= self.value <= 1:
            example = f": {self.value / 100:g}, not {self.value:g}" if 1 < self.value <= 100 else ""
            raise UserError(f"stop_when {self}: {metric.name} is a share, from 0 to 1{example}")
        if not self.patience and self.at_least != metric.higher:
            better, sign = ("higher", ">=") if metric.higher else ("lower", "<=")
            raise UserError(f"stop_when {self}: {better} {metric.name} is better: use {sign}")

    def missing(self, scores: Mapping[str, Mapping[str, float]]) -> str:
        """A note if a round's scores, by metric and kind, have none of that kind; else empty."""
        kinds = scores.get(self.metric, {}) if self.metric else next(iter(scores.values()), {})
        if self.patience or self.kind in kinds:
            return ""
        return f"stop_when {self}: there is no such score yet; there are {', '.join(kinds) or 'no scores'}"

    def why(self, rows: Sequence[Mapping[str, Any]], metrics: Sequence[Metric], headline: str) -> str:
        """Why the run ends after these lines of rounds.jsonl; empty if it continues. `headline`: the kind of score that
        the method's paper reports."""
        name = self.metric or metrics[0].name
        validated = self.patience and any(row.get("validation") for row in rows)
        scores = [row.get("validation", {}) if validated else row["scores"] for row in rows if row["phase"] == "round"]
        scored = [of[name] for of in scores if of.get(name)]
        if not self.patience:
            reached = [of[self.kind] for of in scored if self.kind in of]
            holds = any(value >= self.value if self.at_least else value <= self.value for value in reached)
            return f"{self} holds" if holds else ""
        kind = headline if any(headline in of for of in scored) else next((kind for of in scored for kind in of), "")
        curve = [of[kind] if metrics[0].higher else -of[kind] for of in scored if kind in of]
        since = len(curve) - 1 - curve.index(max(curve)) if curve else 0
        on = " on validation data" if validated else ""
        return f"no better {name}/{kind}{on} in {since} scored rounds" if since >= self.patience else ""
