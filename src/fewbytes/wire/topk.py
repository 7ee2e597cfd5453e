"""TopK: a few values of a state, and where they stand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fewbytes.errors import FrameError
from fewbytes.state import State
from fewbytes.wire.layout import DTYPES
from fewbytes.wire.payload import Counted, Reader, Writer

INDEX_BITS = 24  # what papers count for an index


@dataclass(frozen=True, eq=False)
class TopK:
    """Chosen values of named tensors, usually the largest. Papers count a value's bytes and 24 bits for its index.

    (Fed-KGF, 3.4; on the wire the indices of a random choice take about log2 C(d, k) bits.) `indices[name]`: places in
    the flattened tensor, int64 (k,), rising; `values[name]`: (k,); `shapes[name]`: the tensor's. The lossy step is
    `of`: all other values are dropped and read as 0.
    """

    shapes: dict[str, tuple[int, ...]]
    indices: State
    values: State

    @classmethod
    def of(cls, state: Mapping[str, Tensor], indices: Mapping[str, Tensor]) -> Self:
        """Keep `state[name]` at `indices[name]` (distinct, rising); all tensors of one type."""
        flat = {name: state[name].detach().cpu().reshape(-1) for name in indices}
        return cls(
            {name: tuple(state[name].shape) for name in indices},
            {name: places.cpu() for name, places in indices.items()},
            {name: flat[name][places.cpu()] for name, places in indices.items()},
        )

    @cached_property
    def _dense(self) -> State:
        state = {}
        for name, shape in self.shapes.items():
            values = self.values[name]
            flat = torch.zeros(math.prod(shape), dtype=values.dtype)
            state[name] = flat.scatter_(0, self.indices[name], values).view(shape)
        return state

    def dense(self) -> State:
        """The tensors by name, zero elsewhere (a fresh dict; the tensors are kept and shared)."""
        return dict(self._dense)

    def write(self, writer: Writer) -> Any:
        header, names = writer.entries({n: self.values[n].new_empty(()).expand(s) for n, s in self.shapes.items()})
        parts, size = [np.zeros(0, np.int64)], 0
        for name in names:
            parts.append(self.indices[name].numpy() + size)
            size += math.prod(self.shapes[name])
        places = writer.places(np.concatenate(parts), size)
        return [header, places, writer.numbers([self.values[name] for name in names], [None] * len(names))]

    @classmethod
    def read(cls, header: Any, reader: Reader) -> Self:
        if not isinstance(header, list) or len(header) != 3:
            raise FrameError("header", "chosen values are malformed")
        entries = reader.entries(header[0])
        dtypes = {entry.dtype for entry in entries}
        if len(dtypes) > 1:
            raise FrameError("type", "chosen values are of several types")
        ends = np.cumsum([entry.size for entry in entries], dtype=np.int64)
        places = reader.places(header[1], int(ends[-1]) if entries else 0)
        counts = np.diff(np.searchsorted(places, ends), prepend=0).tolist()
        dtype = DTYPES[dtypes.pop()] if dtypes else torch.float32
        values = reader.numbers(header[2], dtype, counts, [None] * len(entries)).split(counts)
        starts = [int(end) - entry.size for end, entry in zip(ends, entries, strict=True)]
        indices = torch.from_numpy(places).split(counts)
        names = [entry.name for entry in entries]
        return cls(
            {entry.name: entry.shape for entry in entries},
            {name: part - start for name, part, start in zip(names, indices, starts, strict=True)},
            dict(zip(names, values, strict=True)),
        )

    def states(self) -> State:
        return self._dense

    def counted(self) -> Counted:
        return Counted(
            sum(v.nbytes for v in self.values.values()), INDEX_BITS * sum(v.numel() for v in self.values.values())
        )


def largest(value: Tensor, k: int) -> Tensor:
    """The places of the k largest magnitudes in the flattened tensor, rising; not-a-number counts as largest."""
    return value.abs().reshape(-1).topk(k, sorted=False).indices.sort().values
