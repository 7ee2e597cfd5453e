"""Masked: the values of a state at the places a mask names, and the mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fewbytes.base.errors import FrameError
from fewbytes.base.state import State
from fewbytes.wire.layout import DTYPES, Entry, entry_of
from fewbytes.wire.lossy import Place
from fewbytes.wire.values import Counted, Reader, Writer


@dataclass(frozen=True, eq=False)
class Masked:
    """Values at the ones of a mask. Papers count the values' bytes and one bit for every entry of the mask.

    `mask[name]`: bool tensors; `values`: the kept values of all entries one after another, shape (ones,). The lossy
    step is `of`: values outside the mask are dropped and read as 0.
    """

    mask: State
    values: Tensor

    @classmethod
    def of(cls, state: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Self:
        """Keep `state[name]` where `mask[name]` is true; all tensors of one type, masks of the same shapes."""
        masks = {name: m.detach().cpu() for name, m in mask.items()}
        kept = [state[name].detach().cpu()[m] for name, m in masks.items()]
        return cls(masks, torch.cat(kept) if kept else torch.empty(0))

    @classmethod
    def nonzero(cls, state: Mapping[str, Tensor]) -> Self:
        """Keep the values that are not zero."""
        return cls.of(state, {name: value != 0 for name, value in state.items()})

    @cached_property
    def _dense(self) -> State:
        state = {name: torch.zeros(m.shape, dtype=self.values.dtype) for name, m in self.mask.items()}
        for name, part in self.numbers().items():
            state[name].masked_scatter_(self.mask[name], part)  # unlike state[name][mask] = part, exact for every NaN
        return state

    def dense(self) -> State:
        """The tensors by name, zero outside the mask (a fresh dict; the tensors are kept and shared)."""
        return dict(self._dense)

    def write(self, writer: Writer) -> Any:
        """One mask of all entries, then the kept values of all; the header is [entries, mask, values]."""
        # tensors of the values' type and the masks' shapes that take no memory, to stand for the entries
        shaped = {name: self.values.new_empty(()).expand(m.shape) for name, m in self.mask.items()}
        header, names = writer.entries(shaped)
        parts = self.numbers()
        bits = writer.bits(np.concatenate([self.mask[n].numpy().reshape(-1) for n in names] or [np.zeros(0, bool)]))
        places = [_place(entry_of(name, shaped[name]), self.mask[name]) for name in names]
        return [header, bits, writer.values([parts[name] for name in names], places)]

    @classmethod
    def read(cls, header: Any, reader: Reader) -> Self:
        """Raises FrameError for entries of several types."""
        if not isinstance(header, list) or len(header) != 3:
            raise FrameError("header", "a masked value is malformed")
        entries = reader.entries(header[0])
        dtypes = {entry.dtype for entry in entries}
        if len(dtypes) > 1:
            raise FrameError("type", "a masked value mixes types")
        dtype = DTYPES[dtypes.pop()] if dtypes else torch.float32
        reader.spend_dense(entries)
        flat = torch.from_numpy(reader.bits(header[1], sum(entry.size for entry in entries)))
        masks = {e.name: m.view(e.shape) for e, m in zip(entries, flat.split([e.size for e in entries]), strict=True)}
        parts = reader.values(header[2], dtype, [_place(entry, masks[entry.name]) for entry in entries])
        return cls(masks, torch.cat([torch.empty(0, dtype=dtype), *parts]))

    def states(self) -> State:
        """The tensors, zero outside the mask."""
        return self._dense

    def numbers(self) -> State:
        """The kept values of each entry, one after another."""
        ones = [int(m.count_nonzero()) for m in self.mask.values()]  # a sum would widen the mask eightfold first
        return dict(zip(self.mask, self.values.split(ones), strict=True))

    def counted(self) -> Counted:
        """The kept values' bytes, and one bit for every entry of the mask."""
        return Counted(self.values.nbytes, sum(m.numel() for m in self.mask.values()))


def _place(entry: Entry, mask: Tensor) -> Place:
    return Place(entry, mask.numpy().reshape(-1))
