"""A budget of uplink bytes: the run ends before a round that would exceed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fewbytes.running.promises.promise import Limit, Row

HEADROOM = 1.1  # coded sizes vary: the next round may send this many times what the largest has


class Budget(Limit):
    """The maximum number of bytes that all clients may send. `ends`: whether it ends the run."""

    name = "budget"

    def __init__(self, budget: int, ends: bool) -> None:
        self._budget = budget
        self.terms = f", budget {budget}"
        self.known = "sent" if ends else "never"

    def why(self, rows: Sequence[Row]) -> str:
        """Why another round does not fit, if it sends HEADROOM times as much as the largest so far. The first round
        always fits."""
        rounds = [i for i, row in enumerate(rows) if row["phase"] == "round"]
        if self.known == "never" or not rounds:
            return ""
        so_far = sum(row["uplink_bytes"] for row in rows[: rounds[-1] + 1])  # without later joins, as in a resumed run
        fits = so_far + HEADROOM * max(rows[i]["uplink_bytes"] for i in rounds) <= self._budget
        return "" if fits else "another would exceed the budget"

    def result_entries(self) -> dict[str, Any]:
        """The budget."""
        return {self.name: self._budget}
