"""Numbers of many clients, a row each, that need not fit into memory."""

from __future__ import annotations

import itertools
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from typing import overload

import numpy as np
import torch
from torch import Tensor

from fewbytes.base.errors import MethodError
from fewbytes.base.state import State

IN_MEMORY = 256 << 20  # bytes of a table at most; a larger one lies in a file without a name
BLOCK = 1 << 23  # numbers of all rows that are worked on at a time


class Table:
    """Rows of float32 numbers, of `columns` each, written and read in parts: in memory while they are few."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 (closed with the table)
        weakref.finalize(self, self._file.close)

    def write(self, row: int, values: Tensor, start: int = 0) -> None:
        """Put a flat tensor into a row, from a column on."""
        self._file.seek(4 * (row * self.columns + start))
        self._file.write(values.contiguous().numpy().data)

    def read(self, row: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Columns of a row, flat: all, or those from `start` up to `stop`."""
        count = (self.columns if stop is None else stop) - start
        self._file.seek(4 * (row * self.columns + start))
        return torch.from_numpy(np.frombuffer(bytearray(self._file.read(4 * count)), np.float32))


class Stack(Sequence[State]):
    """States of many clients, all of the same float32 entries, as rows of a table: one of them is in memory at a time,
    or a part of each (`part`)."""

    def __init__(self, states: Sequence[State] = ()) -> None:
        self._shapes: dict[str, torch.Size] = {}
        self._table = Table(0)
        self._rows = 0
        for state in states:
            self.add(state)

    def add(self, state: Mapping[str, Tensor]) -> None:
        """One more. Raises MethodError if its entries are not as those of the first, and float32."""
        shapes = {name: value.shape for name, value in state.items()}
        if not self._rows:
            self._shapes, self._table = shapes, Table(sum(shape.numel() for shape in shapes.values()))
        if shapes != self._shapes or any(value.dtype != torch.float32 for value in state.values()):
            raise MethodError("states of other entries than the first's, or of other types than float32, do not stack")
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
        """Of its entries, in order."""
        return list(self._shapes)

    @property
    def columns(self) -> int:
        """Numbers of a state."""
        return self._table.columns

    def blocks(self) -> list[tuple[int, int]]:
        """Bounds of the parts that are to be worked on one after another, none of more than one entry."""
        width = max(1024, BLOCK // max(1, self._rows) // 1024 * 1024)
        ends = list(itertools.accumulate((shape.numel() for shape in self._shapes.values()), initial=0))
        return [
            (at, min(at + width, end)) for start, end in itertools.pairwise(ends) for at in range(start, end, width)
        ]

    def part(self, start: int, stop: int) -> list[State]:
        """Of each state the numbers from `start` up to `stop`, which are one of `blocks`, flat, under their entry's
        name."""
        return [self.named(self._table.read(row, start, stop), start) for row in range(self._rows)]

    def flat(self, state: Mapping[str, Tensor]) -> Tensor:
        """A state, or a part, as one vector, in the order of the first one's entries."""
        return torch.cat([torch.empty(0), *(state[name].reshape(-1) for name in self._shapes if name in state)])

    def named(self, vector: Tensor, start: int = 0) -> State:
        """Undo `flat`; of a part, which begins at `start`."""
        if len(vector) < self.columns:
            return {self._entry(start): vector}
        parts = vector.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def _entry(self, start: int) -> str:
        ends = itertools.accumulate(shape.numel() for shape in self._shapes.values())
        return next(name for name, end in zip(self._shapes, ends, strict=True) if start < end)


def stacked(states: Sequence[State]) -> Stack:
    """States as a stack, unless they are one."""
    return states if isinstance(states, Stack) else Stack(states)
