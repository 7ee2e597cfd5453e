"""Quantised: the values of a state as 8 or 16 bits each, on a grid for each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from fewbytes.base.errors import FrameError
from fewbytes.base.state import State
from fewbytes.wire import words
from fewbytes.wire.value import Counted, Reader, Writer

DTYPES = {8: torch.uint8, 16: torch.uint16}


@dataclass(frozen=True, eq=False)
class Quantised:
    """Named float32 tensors, quantised: lo + scale * level. Papers count the bits of the levels (indices).

    `levels[name]`: uint8 or uint16 tensors, all of one type; `grid[name]`: float32 (2,), lo and scale. `of` is the
    lossy step.
    """

    levels: State
    grid: State

    @classmethod
    def of(cls, state: Mapping[str, Tensor], bits: Literal[8, 16]) -> Self:
        """Round to the nearest of 2^bits evenly spaced values from each tensor's minimum to its maximum; ties to even.

        A tensor with non-finite values is read as NaN throughout.

        >>> import fewbytes as fb
        >>> import torch
        >>> rounded = fb.Quantised.of({"w": torch.tensor([0.0, 1.003, 2.55])}, bits=8)
        >>> rounded.levels["w"], rounded.dense()["w"]
        (tensor([  0, 100, 255], dtype=torch.uint8), tensor([0.0000, 1.0000, 2.5500]))
        """
        levels, grid = {}, {}
        for name, value in state.items():
            levels[name], grid[name] = quantise(value.detach().cpu().float(), bits)
        return cls(levels, grid)

    @cached_property
    def _dense(self) -> State:
        return {name: dequantise(level, self.grid[name]) for name, level in self.levels.items()}

    def dense(self) -> State:
        """The tensors by name, float32 (a fresh dict; the tensors are kept and shared)."""
        return dict(self._dense)

    def write(self, writer: Writer) -> Any:
        """All grids, then all levels; the header is [entries, bits, grids, levels]."""
        bits = 8 * next(iter(self.levels.values())).dtype.itemsize if self.levels else 8
        shaped = {name: torch.empty(()).expand(level.shape) for name, level in self.levels.items()}
        header, entries = writer.entries(shaped)
        names, none = [entry.name for entry in entries], [None] * len(entries)
        grid = writer.numbers([self.grid[name] for name in names], none)
        return [header, bits, grid, writer.numbers([self.levels[name] for name in names], none)]

    @classmethod
    def read(cls, header: Any, reader: Reader) -> Self:
        """Raises FrameError for entries other than float32, or levels of other than 8 or 16 bits."""
        match header:
            case [entries_header, int(bits), grid_header, levels_header] if bits in DTYPES and bits is not True:
                entries = reader.entries(entries_header)
            case _:
                raise FrameError("header", "a quantised value is malformed")
        if any(entry.dtype != "float32" for entry in entries):
            raise FrameError("type", "quantised values are float32")
        reader.spend_dense(entries)
        names, none = [entry.name for entry in entries], [None] * len(entries)
        grid = reader.numbers(grid_header, torch.float32, [2] * len(entries), none).view(-1, 2).unbind()
        levels = reader.numbers(levels_header, DTYPES[bits], [entry.size for entry in entries], none)
        parts = levels.split([entry.size for entry in entries])
        shaped = {entry.name: part.view(entry.shape) for entry, part in zip(entries, parts, strict=True)}
        return cls(shaped, dict(zip(names, grid, strict=True)))

    def states(self) -> State:
        """The tensors after rounding."""
        return self._dense

    def numbers(self) -> State:
        """The values of each tensor's lowest and highest level, (2,)."""
        arrays = {name: level.numpy() for name, level in self.levels.items() if level.numel()}
        ends = {name: torch.from_numpy(np.stack([a.min(), a.max()])) for name, a in arrays.items()}
        return {name: dequantise(pair, self.grid[name]) for name, pair in ends.items()}

    def counted(self) -> Counted:
        """The levels' bytes."""
        return Counted(value_bytes=sum(level.nbytes for level in self.levels.values()))

    @staticmethod
    def describe(header: Any) -> list[str]:
        """Its entries, and how it is coded."""
        entries, bits, _, levels = header
        return [*words.entries(entries), f"levels of {bits} bits: {words.numbers(levels)}"]


def quantise(x: Tensor, bits: Literal[8, 16]) -> tuple[Tensor, Tensor]:
    """Levels of x's shape, and (lo, scale) of x's type, so that x is about lo + scale * level."""
    top = (1 << bits) - 1
    if not x.numel():
        return torch.zeros(x.shape, dtype=DTYPES[bits]), x.new_zeros(2)
    lo, hi = x.aminmax()
    scale = ((hi.double() - lo.double()) / top).to(x.dtype)
    if scale < torch.finfo(x.dtype).tiny and scale.double() * top < hi.double() - lo.double():
        scale = scale.nextafter(scale.new_tensor(torch.inf))  # rounding down would lose steps for such small numbers
    grid = torch.stack([lo, scale])
    if not grid.isfinite().all():
        return torch.zeros(x.shape, dtype=DTYPES[bits]), torch.full_like(grid, torch.nan)
    steps = (x.double() - lo.double()).div_(scale.double().clamp(min=torch.finfo(torch.float64).tiny)).round_()
    return steps.clamp_(0, top).to(DTYPES[bits]), grid


def dequantise(levels: Tensor, grid: Tensor) -> Tensor:
    """lo + scale * level, of the grid's type and the levels' shape."""
    return levels.to(grid.dtype).mul_(grid[1]).add_(grid[0])
