"""What both ends hold before the first message: a model's first weights, which the first message then need not send."""

from __future__ import annotations

from functools import cached_property

from blake3 import blake3

from fewbytes.base.errors import FrameError
from fewbytes.base.state import State
from fewbytes.wire import Base, Layout
from fewbytes.wire.grid import outlying, snapped, unit_of
from fewbytes.wire.values import flat_words


class First:
    """A model's first weights, as bases of messages; equal at both ends if the weights are, bit for bit."""

    def __init__(self, state: State) -> None:
        hasher = blake3()
        for name, value in state.items():
            hasher.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            hasher.update(flat_words(value).tobytes())
        self.exact = Base(hasher.digest(), state)

    @property
    def digest(self) -> bytes:
        """8 bytes that are equal for equal weights."""
        return self.exact.digest[:8]

    @cached_property
    def apart(self) -> frozenset[str]:
        """The names of weights that are on no grid."""
        return outlying(dict(self.exact.tensors))

    @cached_property
    def unit(self) -> float:
        """The unit of the grid that messages which follow are on."""
        return unit_of(value for name, value in self.exact.tensors.items() if name not in self.apart)

    @cached_property
    def on_grid(self) -> Base:
        """The weights as multiples of the unit."""
        return Base(blake3(self.exact.digest).digest(), snapped(dict(self.exact.tensors), self.unit, self.apart))

    @cached_property
    def layout(self) -> Layout:
        """The names, types and shapes of the weights."""
        return Layout.of(dict(self.exact.tensors))

    def base(self, named: bytes) -> Base:
        """The base that a frame names by the start of its digest. Raises FrameError if these weights are not it."""
        for base in (self.exact, self.on_grid):
            if base.digest.startswith(named):
                return base
        raise FrameError("base", "the message is coded against first weights that are not those given here")
