"""Early stopping: the run ends when a condition on its scores holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fewbytes.core.metrics import Metric
from fewbytes.running.promises.promise import Limit, Phase, Row
from fewbytes.running.stopping import StopWhen


class Stop(Limit):
    """Ends a run by its scores. `headline`: the kind that the method's paper reports."""

    name = "stop_when"

    def __init__(self, when: StopWhen, metrics: Sequence[Metric], headline: str, ends: bool) -> None:
        self._when, self._metrics, self._headline = when, metrics, headline
        self.terms = f", stop_when {when}"
        self.known = "scored" if ends else "never"
        self._scored = self.known == "never"  # no score is needed then

    def recall(self, rows: Sequence[Row]) -> None:
        """Note whether something was scored."""
        self._scored |= any(row["scores"] for row in rows)

    def why(self, rows: Sequence[Row]) -> str:
        """Why the condition ends the run; empty if it does not."""
        return "" if self.known == "never" else self._when.why(rows, self._metrics, self._headline)

    def notes(self, phase: Phase) -> Iterable[str]:
        """A note if the first scores lack the one in the condition."""
        if phase.scores and not self._scored:
            self._scored = True
            if missing := self._when.missing(phase.scores):
                yield missing

    def result_entries(self) -> dict[str, Any]:
        """The condition."""
        return {self.name: str(self._when)}
