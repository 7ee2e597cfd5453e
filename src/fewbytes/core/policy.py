"""Whose replies an exchange needs, and how long an engine on Flower waits for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fewbytes.base.errors import FewbytesError, UserError


@dataclass(frozen=True)
class Policy:
    """Whose replies an exchange needs, and on Flower waits for. Raises UserError for values out of range."""

    min_replies: float = 0.5  # part of the clients asked that must answer, or the run stops
    round_timeout: float = 3600.0  # seconds an exchange waits for its clients
    over_selection: float = 0.0  # asks a cohort this part larger than it must be; the first to answer are taken
    connect_timeout: float = 300.0  # seconds the start waits for all clients; who comes later joins between rounds

    def __post_init__(self) -> None:
        for name, fits, words in (
            ("min_replies", 0 < self.min_replies <= 1, "in (0, 1]"),
            ("round_timeout", 0 < self.round_timeout < math.inf, "above 0"),
            ("over_selection", 0 <= self.over_selection <= 10, "in [0, 10]"),
            ("connect_timeout", 0 < self.connect_timeout < math.inf, "above 0"),
        ):
            if not fits:
                raise UserError(f"{name} must be {words}, not {getattr(self, name)!r}")


class TooFewReplies(FewbytesError):
    """Fewer clients answered than the policy asks for; the run can go on from its last checkpoint."""
