"""Simulated time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fewbytes.core.problem import Id


class Clock:
    """Seconds since a run began, where each client takes so many `seconds` for an exchange (None: real ones, which this
    clock does not count)."""

    def __init__(self, seconds: Sequence[float] | None) -> None:
        self.now = 0.0
        self._seconds = seconds

    @property
    def simulated(self) -> bool:
        """Whether clients answer when this clock says."""
        return self._seconds is not None

    def takes(self, client: Id) -> float:
        """Seconds that a client takes for an exchange."""
        return 0.0 if self._seconds is None else self._seconds[client]

    def exchange(self, asked: Iterable[Id]) -> None:
        """Pass the time in which all of these answer."""
        self.now += max(map(self.takes, asked), default=0.0)
