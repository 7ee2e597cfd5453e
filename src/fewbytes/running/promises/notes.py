"""Notes on a phase: a method's, and those on the run's rounding."""

from __future__ import annotations

from collections.abc import Mapping

from fewbytes.running.promises.promise import Phase, Promise, Row


class Notes(Promise):
    """Puts the notes on the phase's line; those of each round are `always` the same."""

    def __init__(self, always: Mapping[str, str]) -> None:
        self._always = always

    def row(self, phase: Phase) -> Row:
        """The notes by name."""
        noted = {**(self._always if phase.phase == "round" else {}), **phase.noted}
        return {"notes": noted} if noted else {}
