"""Notes on a phase: a method's, and those on the run's rounding."""

from __future__ import annotations

from collections.abc import Mapping

from fewbytes.base.rate import Way
from fewbytes.running.promises.promise import Phase, Promise, Row
from fewbytes.running.rounding import overshot


class Notes(Promise):
    """Puts the notes on the phase's line; those of each round are `always` the same. `bits`: those asked for."""

    def __init__(self, always: Mapping[str, str], bits: Mapping[Way, float]) -> None:
        self._always, self._bits = always, bits

    def row(self, phase: Phase) -> Row:
        """The notes by name; the phase's line has its measurements."""
        noted = dict(phase.noted)
        if phase.phase == "round":
            noted = {**self._always, **overshot(self._bits, phase.row.get("measured", {})), **noted}
        return {"notes": noted} if noted else {}
