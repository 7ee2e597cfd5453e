"""Versions of software at clients' nodes that differ from the server's, for result.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fewbytes.engines.engine import Engine
from fewbytes.engines.roster import Software
from fewbytes.running.promises.promise import Phase, Promise, Row


class OtherSoftware(Promise):
    """Puts what nodes report on the next line, and all of it into the result."""

    def __init__(self) -> None:
        self._reported: dict[int, Software] = {}
        self._written: dict[str, Software] = {}  # by client

    def recall(self, rows: Sequence[Row]) -> None:
        """What earlier lines have stays in the result: rounds were made with it."""
        for row in rows:
            self._written |= row.get("software", {})

    def begin(self, engine: Engine) -> None:
        """Nodes report before a run's first round, or when they connect."""
        self._reported = engine.roster.software

    def row(self, phase: Phase) -> Row:
        """What has not been written yet, by client."""
        new = {str(i): found for i, found in self._reported.items() if self._written.get(str(i)) != found}
        self._written |= new
        return {"software": new} if new else {}

    def result_entries(self) -> dict[str, Any]:
        """By client and name, the versions at its node and at the server."""
        return {"versions_at_clients": self._written} if self._written else {}
