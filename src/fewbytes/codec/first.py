"""What both ends hold before the first message: a model's first weights, which the first message then need not send."""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

from fewbytes.base.state import State
from fewbytes.wire import Base
from fewbytes.wire.lossy import snapped, unit_of
from fewbytes.wire.values import flat_words


@dataclass(frozen=True)
class First:
    """A model's first weights as the base of messages: `exact`, and `on_grid`, whose values are multiples of `unit`."""

    exact: Base
    on_grid: Base
    unit: float

    @classmethod
    def of(cls, state: State) -> First:
        """Equal at both ends if the weights are equal to the bit."""
        hasher = blake3()
        for name, value in state.items():
            hasher.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            hasher.update(flat_words(value).tobytes())
        digest, unit = hasher.digest(), unit_of(state.values())
        return cls(Base(digest, state), Base(blake3(digest).digest(), snapped(state, unit)), unit)

    @property
    def digest(self) -> bytes:
        """8 bytes that are equal for equal weights."""
        return self.exact.digest[:8]
