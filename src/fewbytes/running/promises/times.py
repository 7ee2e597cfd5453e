"""Durations of phases, real and simulated."""

from __future__ import annotations

from fewbytes.base.clock import now
from fewbytes.core.speeds import Speeds
from fewbytes.running.promises.promise import Phase, Promise, Row


class Simulated(Promise):
    """Clients take simulated time."""

    def __init__(self, speeds: Speeds) -> None:
        self.terms = f", speeds {speeds}"


class Times(Promise):
    """Ends each line; `simulated`: whether there is a simulated clock."""

    def __init__(self, simulated: bool) -> None:
        self._simulated = simulated

    def row(self, phase: Phase) -> Row:
        """The mean staleness of a stream's replies in rounds, seconds, and when the phase ended."""
        stale, (seconds, scoring) = phase.staleness, phase.seconds
        return {
            **({"staleness": round(sum(stale) / len(stale), 4)} if stale else {}),
            **({"simulated_seconds": round(phase.clock, 4)} if self._simulated else {}),
            "seconds": round(seconds, 4),
            "seconds_scoring": round(scoring, 4),
            "time": now(),
        }
