"""Reminds of clients that stay away, as long as they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fewbytes.core.policy import ABSENT
from fewbytes.core.problem import Id
from fewbytes.engines.engine import Engine
from fewbytes.running.promises.promise import Phase, Promise, Row

EVERY = 5  # rounds between reminders
AWAY = "unreachable"  # the outcome of a request to a client whose node is not connected


class Absences(Promise):
    """Counts the rounds in a row that each client has missed because its node was absent or unfit."""

    def __init__(self) -> None:
        self._missed: dict[Id, int] = {}
        self._called: Callable[[Id], str] = str
        self._joined: Callable[[], list[Id]] = list

    def recall(self, rows: Sequence[Row]) -> None:
        """Count the missed rounds of earlier lines."""
        for row in rows:
            self._count(row)

    def begin(self, engine: Engine) -> None:
        """Get clients' display names, and those that have joined at any time."""
        self._called, self._joined = engine.sites.called, lambda: engine.roster.clients

    def notes(self, phase: Phase) -> Iterable[str]:
        """The clients that have now missed 5, 10, 15, … rounds in a row."""
        if phase.phase != "round":
            return
        self._count(phase.row)
        late = {client: missed for client, missed in self._missed.items() if missed % EVERY == 0}
        if late:
            who = ", ".join(f"{self._called(client)} for {missed} rounds" for client, missed in sorted(late.items()))
            every = {*self._joined(), *self._missed}  # also those that could not join yet
            yield (
                f"round {phase.round}: still absent: {who}; the run continues with {len(every) - len(self._missed)} of "
                f"{len(every)} clients. With --min-replies 1, rounds wait for all"
            )

    def _count(self, row: Row) -> None:
        if row["phase"] == "round":
            missing = [left for left in row.get("left_out", []) if left["handler"] == ABSENT or left["outcome"] == AWAY]
            away = {left["client"] for left in missing}
            self._missed = {client: self._missed.get(client, 0) + 1 for client in away}
