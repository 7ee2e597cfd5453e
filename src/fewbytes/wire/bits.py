"""Bits: named binary tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from fewbytes.base.errors import FrameError
from fewbytes.base.state import State
from fewbytes.wire import words
from fewbytes.wire.value import Counted, Reader, Writer


@dataclass(frozen=True, eq=False)
class Bits:
    """One bit for every value of named float32 tensors: `bits[name]` bool, of their shapes. Papers count these bits.

    If most of them are equal they travel near their entropy (within 4 % for 10^6 bits, at least 1 in 300 of the rarer
    kind).

    >>> import fewbytes as fb
    >>> import torch
    >>> bits = fb.Bits({"mask": torch.tensor([True, False, True])})
    >>> bits.dense(), bits.counted().mask_bits
    ({'mask': tensor([1., 0., 1.])}, 3)
    """

    bits: State

    def dense(self) -> State:
        """The bits as float32, 0 or 1, by name."""
        return {name: value.float() for name, value in self.bits.items()}

    def write(self, writer: Writer) -> Any:
        """One mask of all entries; the header is [entries, mask]."""
        header, entries = writer.entries({name: torch.empty(()).expand(b.shape) for name, b in self.bits.items()})
        flat = [self.bits[entry.name].cpu().numpy().reshape(-1) for entry in entries]
        return [header, writer.bits(np.concatenate(flat or [np.zeros(0, bool)]))]

    @classmethod
    def read(cls, header: Any, reader: Reader) -> Self:
        """Raises FrameError for entries other than float32."""
        if not isinstance(header, list) or len(header) != 2:
            raise FrameError("header", "bits are malformed")
        entries = reader.entries(header[0])
        if any(entry.dtype != "float32" for entry in entries):
            raise FrameError("type", "bits must represent float32 values")
        reader.spend_dense(entries)
        flat = torch.from_numpy(reader.bits(header[1], sum(entry.size for entry in entries)))
        parts = flat.split([entry.size for entry in entries])
        return cls({entry.name: part.view(entry.shape) for entry, part in zip(entries, parts, strict=True)})

    def states(self) -> State:
        """Nothing: replies are not coded against bits."""
        return {}

    def numbers(self) -> State:
        """Nothing: bits are finite."""
        return {}

    def counted(self) -> Counted:
        """One bit for every value."""
        return Counted(mask_bits=sum(value.numel() for value in self.bits.values()))

    @staticmethod
    def describe(header: Any) -> list[str]:
        """Its entries, and how it is coded."""
        entries, mask = header
        return [*words.entries(entries), words.mask(mask)]
