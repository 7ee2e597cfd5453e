"""How precisely travelling values are kept."""

from __future__ import annotations

from typing import Literal

import msgspec

Way = Literal["uplink", "downlink"]
FEWEST, MOST = 0.1, 16.0  # bits a value that values can be rounded to


class Rate(msgspec.Struct, array_like=True, frozen=True):
    """Precision of rounding: about `bits` per value, or else steps of `step` root mean squares of the rounded values.
    False if nothing is rounded."""

    bits: float = 0.0
    step: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.bits or self.step)


ALL = Rate()
"""Nothing is rounded."""
