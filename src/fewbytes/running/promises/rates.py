"""The rounding settings of each round, as a resumed run may have others."""

from __future__ import annotations

from fewbytes.base.settings import in_file
from fewbytes.running.promises.promise import Phase, Promise, Row
from fewbytes.running.settings import Settings


class Rates(Promise):
    """Puts the settings that round values on the line of each round."""

    def __init__(self, settings: Settings) -> None:
        self._rounding = {key: in_file(value) for key, value in settings.rounding.items()}

    def row(self, phase: Phase) -> Row:
        """The settings by key; nothing if none rounds."""
        return {"rounding": self._rounding} if self._rounding and phase.phase == "round" else {}
