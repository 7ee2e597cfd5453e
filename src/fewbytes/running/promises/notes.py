"""What a method notes of a phase."""

from __future__ import annotations

from fewbytes.running.promises.promise import Phase, Promise, Row


class Notes(Promise):
    """Puts it on the phase's line."""

    def row(self, phase: Phase) -> Row:
        """By what, how much."""
        return {"notes": phase.noted} if phase.noted else {}
