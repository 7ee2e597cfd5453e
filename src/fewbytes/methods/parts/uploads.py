"""A round's uploads of critical values, as rows of a table of which only some columns are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewbytes.base.state import State
from fewbytes.core.problem import Id
from fewbytes.core.table import Stack, Table, stacked
from fewbytes.methods.parts.critical import packed
from fewbytes.wire import Masked


@dataclass
class Uploads:
    """A round's uploads; from clients with critical values, theta_i * m_i as rows of a table and m_i packed."""

    clients: list[Id] = field(default_factory=list)
    rows: dict[Id, int] = field(default_factory=dict)
    samples: list[float] = field(default_factory=list)
    bits: list[NDArray[np.uint8]] = field(default_factory=list)
    values: Stack = field(default_factory=Stack)

    def add(self, client: Id, theta: Masked, samples: int) -> None:
        """One more."""
        self.clients.append(client)
        if len(theta.values):
            self.rows[client] = len(self.rows)
            self.samples.append(float(samples))
            self.values.add(theta.dense())
            self.bits.append(packed({name: theta.mask[name] for name in self.values.names}))

    def masks(self, start: int = 0, stop: int | None = None) -> Iterator[State]:
        """The mask of each row, or the same slice of it as `Stack.part` gives of values."""
        for bits in self.bits:
            yield self.values.named(unpacked(bits, start, self.values.columns if stop is None else stop), start)

    def combined(
        self,
        values: Sequence[State],
        combine: Callable[[Sequence[State], Sequence[State]], tuple[State, Sequence[State]]],
    ) -> tuple[Callable[[Id], State], State]:
        """The reply for each client, and the mean. `combine` takes the rows' values and masks, some columns at a time,
        and returns the mean and each row's reply. A client without a row gets the mean. `values`: the rows' values,
        possibly clipped.
        """
        rows = stacked(values)
        thetas, average = Table(rows.columns, rows.dtype), torch.empty(rows.columns, dtype=rows.dtype)
        for start, stop in rows.blocks():
            mean, each = combine(rows.part(start, stop), list(self.masks(start, stop)))
            average[start:stop] = rows.flat(mean)
            for row, theta in enumerate(each):
                thetas.write(row, rows.flat(theta), start)
        everywhere = rows.named(average)

        def of(client: Id) -> State:
            return rows.named(thetas.read(self.rows[client])) if client in self.rows else everywhere

        return of, everywhere


def unpacked(bits: NDArray[np.uint8], start: int, stop: int) -> Tensor:
    """The entries of a packed mask from `start` up to `stop`, flat."""
    first = start % 8
    return torch.from_numpy(np.unpackbits(bits[start // 8 : (stop + 7) // 8])[first : first + stop - start].view(bool))
