"""The number of rounds of a run: those planned, or fewer by a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fewbytes.running.promises.promise import Limit, Promise, Row


class Rounds:
    """`last`: the number of the last round, `planned` until a limit ends the run before."""

    def __init__(self, planned: int, promises: Sequence[Promise]) -> None:
        self.planned = self.last = planned
        self.why = ""  # no round comes after the last
        self._ended_by = ""
        self._limits = [promise for promise in promises if isinstance(promise, Limit)]

    def end(self, rows: Sequence[Row], t: int) -> bool:
        """Whether no round comes after these lines, by a limit; then round t is the last."""
        for limit in self._limits:
            if why := limit.why(rows):
                self._ended_by, self.why, self.last = limit.name, why, min(self.last, t)
                return True
        return False

    def may_end(self, known: Literal["sent", "scored"]) -> bool:
        """Whether a limit may end the run by what is known once a round is over, or scored."""
        return any(limit.known == known for limit in self._limits)

    def result_entries(self) -> dict[str, Any]:
        """The limits, and which of them ended the run, for result.json."""
        entries = {key: value for limit in self._limits for key, value in limit.result_entries().items()}
        return entries | {"ended_by": self._ended_by if self.last < self.planned else None} if entries else {}
