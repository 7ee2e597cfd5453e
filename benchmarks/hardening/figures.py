"""What a measurement of a fault comes to."""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """What was measured, the figure, its goal, and whether it is met (None: the figure has no goal)."""

    what: str
    figure: str
    goal: str
    met: bool | None
