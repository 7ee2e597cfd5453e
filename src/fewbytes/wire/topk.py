"""TopK: selected values of a state, and their places."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fewbytes.base.errors import FrameError, MethodError
from fewbytes.base.state import State
from fewbytes.wire import words
from fewbytes.wire.layout import DTYPES
from fewbytes.wire.value import Counted, Reader, Writer

INDEX_BITS = 24  # the papers' count for an index
ALL = 16  # maximum dimensions of a tensor


@dataclass(frozen=True, eq=False)
class TopK:
    """Selected values of named tensors, usually the largest. Papers count a value's bytes and 24 bits for each index.

    (Fed-KGF, 3.4; on the wire the indices of a random choice take about log2 C(d, k) bits.) `shapes[name]`: the
    tensor's; `indices[name]`: places in its flattened first `depth` dimensions, int64 (k,), ascending; `values[name]`:
    (k, n), the values there: n is 1, or with a smaller `depth` the size of the other dimensions. `of` is the lossy
    step: all other values are dropped and read as 0.
    """

    shapes: dict[str, tuple[int, ...]]
    indices: State
    values: State
    depth: int = ALL

    @classmethod
    def of(cls, state: Mapping[str, Tensor], indices: Mapping[str, Tensor], depth: int = ALL) -> Self:
        """Keep `state[name]` at `indices[name]` (distinct, rising); all tensors of one type.

        `depth` 2 keeps whole kernels of convolutions. Raises MethodError for indices that are not distinct and rising.

        >>> import fewbytes as fb
        >>> import torch
        >>> from fewbytes.wire.topk import largest
        >>> w = torch.tensor([0.1, -3.0, 0.2, 2.0])
        >>> fb.TopK.of({"w": w}, {"w": largest(w, 2)}).dense()
        {'w': tensor([ 0., -3.,  0.,  2.])}
        """
        shapes = {name: tuple(state[name].shape) for name in indices}
        places = {name: index.cpu() for name, index in indices.items()}
        for name, index in places.items():
            if not bool((index[1:] > index[:-1]).all()):
                raise MethodError(f"the indices of {name!r} are not distinct and rising: sort them")
        kept = {n: state[n].detach().cpu().reshape(_split(shapes[n], depth))[index] for n, index in places.items()}
        return cls(shapes, places, kept, depth)

    @cached_property
    def _dense(self) -> State:
        state = {}
        for name, shape in self.shapes.items():
            rows = torch.zeros(_split(shape, self.depth), dtype=self.values[name].dtype)
            state[name] = rows.index_copy_(0, self.indices[name], self.values[name]).view(shape)
        return state

    def dense(self) -> State:
        """The tensors by name, zero elsewhere (a fresh dict; the tensors are kept and shared)."""
        return dict(self._dense)

    def write(self, writer: Writer) -> Any:
        """The places of all entries, then the values there; the header is [entries, depth, places, values]."""
        shaped = {name: self.values[name].new_empty(()).expand(shape) for name, shape in self.shapes.items()}
        header, entries = writer.entries(shaped)
        names = [entry.name for entry in entries]
        parts, size = [np.zeros(0, np.int64)], 0
        for name in names:
            parts.append(self.indices[name].numpy() + size)
            size += _split(self.shapes[name], self.depth)[0]
        places = writer.places(np.concatenate(parts), size)
        return [header, self.depth, places, writer.numbers([self.values[name] for name in names], [None] * len(names))]

    @classmethod
    def read(cls, header: Any, reader: Reader) -> Self:
        """Raises FrameError for entries of several types."""
        match header:
            case [named, int(depth), found, numbers] if type(depth) is int and 0 < depth <= ALL:
                entries = reader.entries(named)
            case _:
                raise FrameError("header", "chosen values are malformed")
        dtypes = {entry.dtype for entry in entries}
        if len(dtypes) > 1:
            raise FrameError("type", "chosen values are of several types")
        reader.spend_dense(entries)
        rows, widths = zip(*(_split(entry.shape, depth) for entry in entries), strict=True) if entries else ((), ())
        ends = np.cumsum(rows, dtype=np.int64)
        places = reader.places(found, sum(rows))
        counts = np.diff(np.searchsorted(places, ends), prepend=0).tolist()
        sizes = [count * width for count, width in zip(counts, widths, strict=True)]
        dtype = DTYPES[dtypes.pop()] if dtypes else torch.float32
        values = reader.numbers(numbers, dtype, sizes, [None] * len(entries)).split(sizes)
        indices = torch.from_numpy(places).split(counts)
        names = [entry.name for entry in entries]
        return cls(
            {entry.name: entry.shape for entry in entries},
            {n: index - int(end) + k for n, index, end, k in zip(names, indices, ends, rows, strict=True)},
            {n: v.view(k, width) for n, v, k, width in zip(names, values, counts, widths, strict=True)},
            depth,
        )

    def states(self) -> State:
        """The tensors, zero at places that are not selected."""
        return self._dense

    def numbers(self) -> State:
        """The chosen values."""
        return self.values

    def counted(self) -> Counted:
        """The values' bytes, and 24 bits for every index."""
        chosen = sum(len(index) for index in self.indices.values())
        return Counted(sum(value.nbytes for value in self.values.values()), INDEX_BITS * chosen)

    @staticmethod
    def describe(header: Any) -> list[str]:
        """Its entries, and how it is coded."""
        entries, _, places, numbers = header
        return [*words.entries(entries), words.places(places), f"values: {words.numbers(numbers)}"]


def _split(shape: tuple[int, ...], depth: int) -> tuple[int, int]:
    """Number of places in a tensor's first `depth` dimensions, and number of values at each."""
    return math.prod(shape[:depth]), math.prod(shape[depth:])


def largest(value: Tensor, k: int) -> Tensor:
    """The places of the k largest magnitudes in the flattened tensor, ascending; NaN counts as largest."""
    return value.abs().reshape(-1).topk(k, sorted=False).indices.sort().values
