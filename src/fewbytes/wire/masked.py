"""Masked: the values of a state at a mask's ones, and the mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from fewbytes.base.errors import FrameError
from fewbytes.base.state import State
from fewbytes.wire import words
from fewbytes.wire.layout import DTYPES, Place
from fewbytes.wire.value import Counted, Reader, Writer
from fewbytes.wire.values import flat_words, tensor_of


@dataclass(frozen=True, eq=False)
class Masked:
    """Values at the ones of a mask. Papers count the values' bytes and one bit for every entry of the mask.

    `mask[name]`: bool tensors; `values`: the kept values of all entries one after another, shape (ones,). `of` is the
    lossy step: values outside the mask are dropped and read as 0.
    """

    mask: State
    values: Tensor
    roundable: ClassVar[bool] = True  # a run may round it: see `Writer.values`

    @classmethod
    def of(cls, state: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Self:
        """Keep `state[name]` where `mask[name]` is true; all tensors of one type, masks of the same shapes.

        >>> import fewbytes as fb
        >>> import torch
        >>> w = torch.tensor([0.1, -3.0, 0.2, 2.0])
        >>> kept = fb.Masked.of({"w": w}, {"w": w.abs() > 1})
        >>> kept.values, kept.dense()
        (tensor([-3.,  2.]), {'w': tensor([ 0., -3.,  0.,  2.])})
        >>> kept.counted()
        Counted(value_bytes=8, mask_bits=4)
        """
        mask = {name: m.detach().cpu() for name, m in mask.items()}
        # by indices of the ones: takes a fifth of the time of a boolean mask
        kept = [
            tensor_of(flat_words(state[name]).take(np.flatnonzero(m)), state[name].dtype) for name, m in mask.items()
        ]
        return cls(mask, torch.cat(kept) if kept else torch.empty(0))

    @classmethod
    def nonzero(cls, state: Mapping[str, Tensor]) -> Self:
        """Keep the values that are not zero."""
        return cls.of(state, {name: value != 0 for name, value in state.items()})

    @cached_property
    def _dense(self) -> State:
        state = {name: torch.zeros(m.shape, dtype=self.values.dtype) for name, m in self.mask.items()}
        for name, part in self.numbers().items():
            flat_words(state[name])[np.flatnonzero(self.mask[name])] = flat_words(part)
        return state

    def dense(self) -> State:
        """The tensors by name, zero outside the mask (a fresh dict; the tensors are kept and shared)."""
        return dict(self._dense)

    def write(self, writer: Writer) -> Any:
        """One mask of all entries, then the kept values of all; the header is [entries, mask, values]."""
        # placeholders with the values' type and the masks' shapes, which take no memory
        shaped = {name: self.values.new_empty(()).expand(m.shape) for name, m in self.mask.items()}
        header, entries = writer.entries(shaped)
        parts = self.numbers()
        masks = [self.mask[entry.name].numpy().reshape(-1) for entry in entries]
        bits = writer.bits(np.concatenate(masks or [np.zeros(0, bool)]))
        places = [Place(entry, mask) for entry, mask in zip(entries, masks, strict=True)]
        return [header, bits, writer.values([parts[entry.name] for entry in entries], places)]

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
        parts = reader.values(header[2], dtype, [Place(e, masks[e.name].numpy().reshape(-1)) for e in entries])
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

    @staticmethod
    def describe(header: Any) -> list[str]:
        """Its entries, and how it is coded."""
        entries, mask, values = header
        return [*words.entries(entries), words.mask(mask), f"values: {words.numbers(values)}"]
