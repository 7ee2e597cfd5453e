"""The best model: the round with the best score on validation data, whose checkpoint is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fewbytes.core.metrics import Metric
from fewbytes.running.promises.promise import RECEIVED, Phase, Promise, Row


class Best(NamedTuple):
    """The round whose model is the best, by a kind of the first metric, and its value. `last`: no round came after."""

    round: int
    kind: str
    value: float
    last: bool


class BestModel(Promise):
    """Finds the best round so far. `headline`: the kind of score that the method's paper reports. `validated`: by
    scores on validation data; else by those that the run reports, which then are too good."""

    def __init__(self, metrics: Sequence[Metric], headline: str, validated: bool) -> None:
        self._metric, self._headline, self._validated = metrics[0], headline, validated
        self._scores: dict[int, dict[str, float]] = {}  # by round and kind
        self._noted = False

    def recall(self, rows: Sequence[Row]) -> None:
        """Add the scores of earlier lines."""
        for row in rows:
            self._add(row["round"], row["phase"], row.get("validation", {}) if self._validated else row["scores"])

    def row(self, phase: Phase) -> Row:
        """Add the phase's scores; a line has them already."""
        self._add(phase.round, phase.phase, phase.validation if self._validated else phase.scores)
        return {}

    def _add(self, t: int, phase: str, scores: dict[str, dict[str, float]]) -> None:
        """The finish changes the last round's model; what clients received is the model of the round before."""
        if phase in ("round", "finish"):
            t, found = t - (phase == "finish"), dict(scores.get(self._metric.name, {}))
            if t - 1 in self._scores and RECEIVED in found:
                self._scores[t - 1][RECEIVED] = found[RECEIVED]
            found.pop(RECEIVED, None)
            self._scores[t] = found or self._scores.get(t, {})

    def notes(self, phase: Phase) -> Iterable[str]:
        """That nothing can be validated, once."""
        if self._validated and not self._noted and phase.phase == "round" and phase.scores and not phase.validation:
            self._noted = True
            yield (
                "no model is validated: the server has no test data to hold samples out of, and clients neither keep "
                "models of their own nor train one that they receive; so the last model is kept, and patience uses "
                "test scores. Give the server test data, or leave validation out"
            )

    def best(self, until: int | None = None) -> Best | None:
        """The best of the rounds until this one (None: of all), the first of equal ones; None if none has a score."""
        rounds = {t: kinds for t, kinds in self._scores.items() if until is None or t <= until}
        found = list(dict.fromkeys(kind for kinds in rounds.values() for kind in kinds))
        if not found:
            return None
        kind = self._headline if self._headline in found else found[0]
        curve = {t: kinds[kind] for t, kinds in rounds.items() if kind in kinds}
        best = (max if self._metric.higher else min)(curve, key=lambda t: curve[t])
        return Best(best, kind, curve[best], best == max(rounds))

    def spared(self, kept: Iterable[int]) -> set[int]:
        """The best round as of each of these: a run that goes back to one still has it."""
        return {best.round for t in kept if (best := self.best(t)) is not None}

    def result_entries(self) -> dict[str, Any]:
        """The best round, and by what it is chosen."""
        if (best := self.best()) is None:
            return {}
        by = {"metric": self._metric.name, "kind": best.kind, "value": best.value}
        return {"best_model": {"round": best.round, "chosen_on": "validation" if self._validated else "test", **by}}
