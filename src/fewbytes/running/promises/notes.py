"""A method's notes on a phase."""

from __future__ import annotations

from fewbytes.running.promises.promise import Phase, Promise, Row


class Notes(Promise):
    """Puts the notes on the phase's line."""

    def row(self, phase: Phase) -> Row:
        """The notes by name."""
        return {"notes": phase.noted} if phase.noted else {}
