"""Numbers that are not finite: each line names them, and a note reports the first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fewbytes.core.objective import Objective
from fewbytes.running.promises.promise import Phase, Promise, Row


class NotFinite(Promise):
    """Reports measurements and replies that are not finite. `objective`: hints at the cause; `doubts`: more likely
    ones, such as a column in other units."""

    def __init__(self, objective: Objective, doubts: Sequence[str] = ()) -> None:
        self._hint, self._warned = "; ".join(doubts[:3]) or objective.hint, False

    def row(self, phase: Phase) -> Row:
        """The names of values that are not finite."""
        broken = phase.records.not_finite() + [f"reply.{handler}" for handler in sorted(phase.not_finite)]
        return {"not_finite": broken} if broken else {}

    def notes(self, phase: Phase) -> Iterable[str]:
        """The first occurrence since the run started or resumed, and the clients."""
        if not (names := phase.row.get("not_finite")) or self._warned:
            return
        self._warned = True
        rejected = [left for left in phase.row.get("left_out", []) if left["outcome"] == "rejected"]
        why = "; ".join(f"client {left['client']} rejected: {left['why']}" for left in rejected)
        if not why and (whose := phase.records.not_finite_of()):
            why = f"{self._hint} ({', '.join(map(phase.called, whose[:3]))} first)"
        yield f"round {phase.round}: {', '.join(names)} not finite: {why or self._hint}"
