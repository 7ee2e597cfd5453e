"""What a round's clients sent of their critical values, as rows of a table: some columns are in memory at a time."""

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
    """What a round's clients sent; of those with a critical value theta_i * m_i as rows of a table, and m_i packed."""

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
        """Of each row the mask, or a part of it as `Stack.part` has values."""
        for bits in self.bits:
            yield self.values.named(unpacked(bits, start, self.values.columns if stop is None else stop), start)

    def combined(
        self,
        values: Sequence[State],
        combine: Callable[[Sequence[State], Sequence[State]], tuple[State, Sequence[State]]],
    ) -> tuple[Callable[[Id], State], State]:
        """What each client gets back, and the mean, made by `combine` of the rows' values and masks, a part of the
        columns at a time: the mean, and of each row what its client gets. Who has no row gets the mean. `values`: the
        rows', if need be clipped.
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
