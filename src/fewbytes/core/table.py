"""Rows of numbers of many clients, which need not fit into memory."""

from __future__ import annotations

import itertools
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from typing import overload

import torch
from torch import Tensor

from fewbytes.base.errors import MethodError
from fewbytes.base.state import State

IN_MEMORY = 256 << 20  # bytes of a table at most; a larger one is in an unnamed file
BLOCK = 1 << 23  # numbers of all rows processed at a time


class Table:
    """Rows of `columns` float32 or float64 numbers each, written and read in parts: in memory while they fit."""

    def __init__(self, columns: int, dtype: torch.dtype = torch.float32) -> None:
        self.columns, self.dtype = columns, dtype
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 (closed with the table)
        weakref.finalize(self, self._file.close)

    def write(self, row: int, values: Tensor, start: int = 0) -> None:
        """Write a flat tensor into a row, from column `start` on."""
        self._file.seek(self.dtype.itemsize * (row * self.columns + start))
        self._file.write(values.to(self.dtype).contiguous().numpy().data)

    def read(self, row: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Columns of a row, flat: all, or from `start` up to `stop`."""
        count = (self.columns if stop is None else stop) - start
        self._file.seek(self.dtype.itemsize * (row * self.columns + start))
        data = bytearray(self._file.read(self.dtype.itemsize * count))
        return torch.frombuffer(data, dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)


class Stack(Sequence[State]):
    """States of many clients, with the same floating-point entries, as rows of a table: one of them is in memory at a
    time, or a part of each (`part`)."""

    def __init__(self, states: Sequence[State] = ()) -> None:
        self._shapes: dict[str, torch.Size] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._table = Table(0)
        self._rows = 0
        for state in states:
            self.add(state)

    def add(self, state: Mapping[str, Tensor]) -> None:
        """Add a state. Raises MethodError unless its entries match the first one's, and are floats."""
        shapes = {name: value.shape for name, value in state.items()}
        dtypes = {name: value.dtype for name, value in state.items()}
        if not self._rows:
            wide = torch.float64 if torch.float64 in dtypes.values() else torch.float32
            self._shapes, self._dtypes = shapes, dtypes
            self._table = Table(sum(shape.numel() for shape in shapes.values()), wide)
        if shapes != self._shapes or dtypes != self._dtypes or not all(d.is_floating_point for d in dtypes.values()):
            raise MethodError("states of other entries than the first's, or that are not floats, do not stack")
        self._table.write(self._rows, self.flat(state))
        self._rows += 1

    def __len__(self) -> int:
        return self._rows

    @overload
    def __getitem__(self, row: int) -> State: ...

    @overload
    def __getitem__(self, row: slice) -> list[State]: ...

    def __getitem__(self, row: int | slice) -> State | list[State]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(self._rows))]
        if not -self._rows <= row < self._rows:
            raise IndexError(row)
        return self.named(self._table.read(row % self._rows))

    @property
    def names(self) -> list[str]:
        """Names of its entries, in order."""
        return list(self._shapes)

    @property
    def columns(self) -> int:
        """Number of values in a state."""
        return self._table.columns

    @property
    def dtype(self) -> torch.dtype:
        """The common type of all its entries."""
        return self._table.dtype

    def blocks(self) -> list[tuple[int, int]]:
        """Bounds of the parts to process one after another, none with more than one entry."""
        width = max(1024, BLOCK // max(1, self._rows) // 1024 * 1024)
        ends = list(itertools.accumulate((shape.numel() for shape in self._shapes.values()), initial=0))
        return [
            (at, min(at + width, end)) for start, end in itertools.pairwise(ends) for at in range(start, end, width)
        ]

    def part(self, start: int, stop: int) -> list[State]:
        """The numbers of each state from `start` up to `stop`, one of `blocks`, flat, under their entry's name."""
        return [self.named(self._table.read(row, start, stop), start) for row in range(self._rows)]

    def flat(self, state: Mapping[str, Tensor]) -> Tensor:
        """A state, or a part, as one vector, in the order of the first one's entries."""
        parts = (state[name].reshape(-1).to(self.dtype) for name in self._shapes if name in state)
        return torch.cat([torch.empty(0, dtype=self.dtype), *parts])

    def named(self, vector: Tensor, start: int = 0) -> State:
        """Undo `flat`, for numbers or a mask; `start`: where a part begins."""
        mask = vector.dtype == torch.bool
        if len(vector) < self.columns:
            name = self._entry(start)
            return {name: vector if mask else vector.to(self._dtypes[name])}
        parts = vector.split([shape.numel() for shape in self._shapes.values()])
        return {
            name: (part if mask else part.to(self._dtypes[name])).view(shape)
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def _entry(self, start: int) -> str:
        ends = itertools.accumulate(shape.numel() for shape in self._shapes.values())
        return next(name for name, end in zip(self._shapes, ends, strict=True) if start < end)


def stacked(states: Sequence[State]) -> Stack:
    """States as a stack, unless they already are one."""
    return states if isinstance(states, Stack) else Stack(states)
