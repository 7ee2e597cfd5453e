"""Durations of phases, real and simulated."""

from __future__ import annotations

from fewbytes.base.clock import now
from fewbytes.running.promises.promise import Phase, Promise, Row
from fewbytes.running.settings import Settings


class Simulated(Promise):
    """Clients take simulated time, or as many steps as fit in a round's time."""

    def __init__(self, settings: Settings) -> None:
        given = {"speeds": settings.speeds, "links": settings.links, "round time": settings.round_time}
        self.terms = "".join(f", {name} {value}" for name, value in given.items() if value is not None)


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
