"""The protocol of wire values, which write and read themselves, and of what they write to and read from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from fewbytes.base.state import State
from fewbytes.wire.layout import Entry, Place
from fewbytes.wire.sections import Array, Buffer


class Writer(Protocol):
    """Accepts the parts of a value. Each method returns the item for the frame's header."""

    coded: bool

    def section(self, parts: list[Buffer]) -> None:
        """Write raw bytes, one part after another; the header has no item for them."""

    def entries(self, state: Mapping[str, Tensor]) -> tuple[Any, list[Entry]]:
        """The header's item for the entries that travel, and these in order."""

    def numbers(self, tensors: Sequence[Tensor], bases: Sequence[Array | None]) -> Any:
        """Write tensors of one type as one value; `bases`: bits that each is likely to be close to."""

    def bits(self, mask: Array) -> Any:
        """Write a flat bool array."""

    def places(self, places: Array, size: int) -> Any:
        """Write distinct places below `size`, int64 and rising."""

    def values(self, tensors: Sequence[Tensor], places: Sequence[Place], lossy: bool = True) -> Any:
        """Write values of one type at these places; if `lossy`, a run may have them rounded."""

    def state(self, state: Mapping[str, Tensor], lossy: bool = False) -> Any:
        """Write named tensors of any types; if `lossy`, a run may have them rounded."""


class Reader(Protocol):
    """Returns the parts that a `Writer` accepted, given the header's items; raises FrameError for anything else."""

    def section(self) -> memoryview:
        """The next section."""

    def spend(self, nbytes: int) -> None:
        """Count bytes, before they are allocated, against the receiver's limit."""

    def spend_dense(self, entries: Sequence[Entry]) -> None:
        """Count the dense size of entries against the limit, for values that have only parts of them."""

    def entries(self, header: Any) -> list[Entry]:
        """The entries, in the order they travel."""

    def numbers(self, header: Any, dtype: torch.dtype, sizes: Sequence[int], bases: Sequence[Array | None]) -> Tensor:
        """One flat tensor of sum(sizes) elements."""

    def bits(self, header: Any, size: int) -> Array:
        """A flat bool array."""

    def places(self, header: Any, size: int) -> Array:
        """Distinct places below `size`, int64 and rising."""

    def values(self, header: Any, dtype: torch.dtype, places: Sequence[Place]) -> list[Tensor]:
        """A flat tensor for each place."""

    def state(self, header: Any) -> State:
        """Named tensors."""


@runtime_checkable
class WireValue(Protocol):
    """A value that writes and reads itself. Lossy steps happen when it is made; writing and reading are exact."""

    def write(self, writer: Writer) -> Any:
        """Write the arrays as sections; return the item for the frame's header (packable by msgpack)."""

    @classmethod
    def read(cls, header: Any, reader: Reader) -> Self:
        """Undo `write`. Raises FrameError for anything that `write` would not have written."""

    def states(self) -> State:
        """The tensors by name that a reply to this value may be coded against."""

    def numbers(self) -> State:
        """Its numbers by name: finite exactly where those of `states` are, without computing these."""

    def counted(self) -> Counted:
        """The papers' count for this value."""

    @staticmethod
    def describe(header: Any) -> list[str]:
        """The header's item from `write`, described in lines; may raise anything for another item."""


def is_wire_value(value: Any) -> TypeGuard[WireValue]:
    """Whether a value is a wire value. Cached by class, as checking a protocol is slow in Python."""
    kind: Any = type(value)
    return _is_wire_class(kind)


@functools.cache
def _is_wire_class(kind: Any) -> bool:
    return issubclass(kind, WireValue)


@dataclasses.dataclass(frozen=True)
class Counted:
    """The papers' count: bytes of the values themselves, and mask entries at one bit each."""

    value_bytes: int = 0
    mask_bits: int = 0

    @property
    def nominal_bytes(self) -> int:
        """Values and mask bits together, in whole bytes."""
        return self.value_bytes + (self.mask_bits + 7) // 8

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.value_bytes + other.value_bytes, self.mask_bits + other.mask_bits)


def entries_of(value: Any) -> Mapping[str, Tensor]:
    """Tensors of a wire value by name: those a reply may be coded against or, if none, all of them; empty for other
    values."""
    if not is_wire_value(value):
        return {}
    if states := value.states():
        return states
    attributes = vars(value)
    first = next((each for each in attributes.values() if isinstance(each, Mapping)), attributes)
    return {name: tensor for name, tensor in first.items() if isinstance(tensor, Tensor)}
