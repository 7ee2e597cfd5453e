"""How much of the values that travel is kept."""

from __future__ import annotations

from typing import Literal

import msgspec

Way = Literal["uplink", "downlink"]


class Rate(msgspec.Struct, array_like=True, frozen=True):
    """How much of values is kept: about so many `bits` of each, or else what is left in steps of `step` root mean
    squares of what is rounded. False: all."""

    bits: float = 0.0
    step: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.bits or self.step)


ALL = Rate()
"""Nothing is rounded."""
