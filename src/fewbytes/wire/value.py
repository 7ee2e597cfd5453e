"""What a wire value is: a value that knows how it travels, and what it writes to and reads from."""

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
    """Takes what a value is made of. Each function gives what stands for it in the frame's header."""

    coded: bool

    def section(self, parts: list[Buffer]) -> None:
        """Write bytes as they are, one part after another; the header says nothing of them."""

    def entries(self, state: Mapping[str, Tensor]) -> tuple[Any, list[Entry]]:
        """Say which entries travel: the header, and the entries in the order they travel."""

    def numbers(self, tensors: Sequence[Tensor], bases: Sequence[Array | None]) -> Any:
        """Write tensors of one type as one value; `bases`: the bits that each is likely to be near."""

    def bits(self, mask: Array) -> Any:
        """Write a flat bool array."""

    def places(self, places: Array, size: int) -> Any:
        """Write distinct places below `size`, int64 and rising."""

    def values(self, tensors: Sequence[Tensor], places: Sequence[Place], lossy: bool = True) -> Any:
        """Write the values, of one type, that stand at these places; if `lossy`, a run may have them rounded."""

    def state(self, state: Mapping[str, Tensor], lossy: bool = False) -> Any:
        """Write named tensors of any types; if `lossy`, a run may have them rounded."""


class Reader(Protocol):
    """Gives back what a `Writer` took, by what stands in the header. All raise FrameError for anything else."""

    def section(self) -> memoryview:
        """The next section."""

    def spend(self, nbytes: int) -> None:
        """Count bytes that will be allocated against what the receiver is ready to hold."""

    def spend_dense(self, entries: Sequence[Entry]) -> None:
        """Count what the entries take once a value that holds less of them is made dense."""

    def entries(self, header: Any) -> list[Entry]:
        """The entries, in the order they travel."""

    def numbers(self, header: Any, dtype: torch.dtype, sizes: Sequence[int], bases: Sequence[Array | None]) -> Tensor:
        """One flat tensor of sum(sizes) elements."""

    def bits(self, header: Any, size: int) -> Array:
        """A flat bool array."""

    def places(self, header: Any, size: int) -> Array:
        """Distinct places below `size`, int64 and rising."""

    def values(self, header: Any, dtype: torch.dtype, places: Sequence[Place]) -> list[Tensor]:
        """For each place a flat tensor."""

    def state(self, header: Any) -> State:
        """Named tensors."""


@runtime_checkable
class WireValue(Protocol):
    """A value that knows how it travels. What is lossy happened when it was made; writing and reading are exact."""

    def write(self, writer: Writer) -> Any:
        """Write the arrays as sections; return what stands in the frame's header (packable by msgpack)."""

    @classmethod
    def read(cls, header: Any, reader: Reader) -> Self:
        """Undo `write`. Raises FrameError for anything `write` would not have written."""

    def states(self) -> State:
        """The tensors by name that a reply to this value may be coded against."""

    def numbers(self) -> State:
        """The numbers it holds, by name: finite exactly where those of `states` are, which are not made for it."""

    def counted(self) -> Counted:
        """What papers count for this value."""

    @staticmethod
    def describe(header: Any) -> list[str]:
        """What `write` put in the header, in lines for people; of another header it may raise anything."""


def is_wire_value(value: Any) -> TypeGuard[WireValue]:
    """Whether a value knows how it travels. Asked of each class once: of a protocol Python takes long to say."""
    kind: Any = type(value)
    return _is_wire_class(kind)


@functools.cache
def _is_wire_class(kind: Any) -> bool:
    return issubclass(kind, WireValue)


@dataclasses.dataclass(frozen=True)
class Counted:
    """What papers count: bytes of the values themselves, and mask entries at one bit each."""

    value_bytes: int = 0
    mask_bits: int = 0

    @property
    def nominal_bytes(self) -> int:
        """Values and mask bits together, in whole bytes."""
        return self.value_bytes + (self.mask_bits + 7) // 8

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.value_bytes + other.value_bytes, self.mask_bits + other.mask_bits)


def entries_of(value: Any) -> Mapping[str, Tensor]:
    """The tensors of a wire value by name: those a reply may be coded against or, if there are none, those it holds; of
    anything else none."""
    if not is_wire_value(value):
        return {}
    if states := value.states():
        return states
    attributes = vars(value)
    first = next((each for each in attributes.values() if isinstance(each, Mapping)), attributes)
    return {name: tensor for name, tensor in first.items() if isinstance(tensor, Tensor)}
