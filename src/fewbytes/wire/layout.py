"""What both ends know in advance: the names, types and shapes of a model's entries, in order."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from fewbytes.base.errors import with_article
from fewbytes.wire.sections import Array

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
"""The tensor types that can travel, by their names in frames."""


Forms = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Types and shapes of tensors by name."""


@dataclass(frozen=True)
class Entry:
    """One tensor's name, type (a key of DTYPES) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensor, uncoded."""
        return self.size * DTYPES[self.dtype].itemsize

    @cached_property
    def whole(self) -> Place:
        """The place of all values of the tensor."""
        return Place(self)

    def describes(self, value: Any) -> bool:
        """Whether a value is a tensor of this type and shape."""
        return isinstance(value, Tensor) and value.shape == self.shape and value.dtype is DTYPES[self.dtype]


@dataclass(frozen=True, eq=False)
class Place:
    """A selection of values of a tensor: `kept` is a flat bool array; None: all of them."""

    entry: Entry
    kept: Array | None = None

    @cached_property
    def size(self) -> int:
        """Number of values."""
        return self.entry.size if self.kept is None else int(np.count_nonzero(self.kept))


@dataclass(frozen=True)
class Layout:
    """The entries of a model in order. Both ends build it from their own model; only its hash travels."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> Layout:
        """The layout of named tensors in their order. Raises TypeError for a type that cannot travel."""
        return cls(tuple(entry_of(name, value) for name, value in state.items()))

    @cached_property
    def index(self) -> dict[str, int]:
        """Entry number by name."""
        return {entry.name: i for i, entry in enumerate(self.entries)}

    @cached_property
    def forms(self) -> Forms:
        """The entries' types and shapes by name."""
        return {entry.name: (DTYPES[entry.dtype], entry.shape) for entry in self.entries}

    def has(self, name: str, value: Any) -> bool:
        """Whether a value is a tensor with the type and shape of the entry `name`."""
        return name in self.index and self.entries[self.index[name]].describes(value)

    @cached_property
    def hash(self) -> bytes:
        """16 bytes that differ when any name, type, shape or the order differs."""
        entries = msgspec.msgpack.encode([[e.name, e.dtype, e.shape] for e in self.entries])
        return hashlib.sha256(entries).digest()[:16]


def forms_of(state: Mapping[str, Tensor]) -> Forms:
    """The types and shapes of named tensors."""
    return {name: (value.dtype, value.shape) for name, value in state.items()}


def entry_of(name: str, value: Tensor) -> Entry:
    """The entry that describes a tensor. Raises TypeError for a type that cannot travel, and for other values."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name!r}: {with_article(type(value))} cannot travel as a tensor")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise TypeError(f"{name!r}: tensors of type {value.dtype} cannot travel; those that can: {', '.join(DTYPES)}")
    return Entry(name, dtype, tuple(value.shape))
