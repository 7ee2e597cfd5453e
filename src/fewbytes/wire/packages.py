"""Packages: selected values of a state, as single values, whole kernels, or a kernel's signs with one magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from fewbytes.base.errors import FrameError
from fewbytes.base.state import State
from fewbytes.wire.topk import ALL, TopK
from fewbytes.wire.value import Counted, Reader, Writer

MOST_PATTERNS = 256
LONGEST = 62  # maximum values of a kernel with a pattern


@dataclass(frozen=True, eq=False)
class Packages:
    """SmartIdx's three packages of named float32 tensors; values in none of them are read as 0.

    `single`: single values, of all tensors. `whole`: kernels, places (i, j) of convolutions' weights (out, in, …).
    `magnitudes`: of kernels sent as signs, in tensors (out, in) by the names of `whole`: such a kernel is m where its
    pattern has a one, -m elsewhere. `patterns`: int64 (P,), bit j for value j of a kernel. `which`: uint8 (n,), the
    pattern of each magnitude. Papers count the first three only.
    """

    single: TopK
    whole: TopK
    magnitudes: TopK
    patterns: Tensor
    which: Tensor

    @cached_property
    def _dense(self) -> State:
        state, whole = self.single.dense(), self.whole.dense()
        places, m = self.magnitudes.indices, self.magnitudes.values
        which = self.which.long().split([len(index) for index in places.values()])
        for name, chosen in zip(places, which, strict=True):
            state[name] = state[name] + whole[name]
            rows = state[name].flatten(0, 1).flatten(1)
            rows[places[name]] = m[name] * signs(self.patterns[chosen], rows.shape[1])
        return state

    def dense(self) -> State:
        """The tensors by name (a fresh dict; the tensors are kept and shared)."""
        return dict(self._dense)

    def write(self, writer: Writer) -> Any:
        """The header is [single, whole, magnitudes, number of patterns, patterns, which]."""
        chosen = [value.write(writer) for value in (self.single, self.whole, self.magnitudes)]
        codings = [writer.numbers([numbers], [None]) for numbers in (self.patterns, self.which)]
        return [*chosen, len(self.patterns), *codings]

    @classmethod
    def read(cls, header: Any, reader: Reader) -> Self:
        """Raises FrameError for packages that do not fit the convolutions or one another."""
        if not isinstance(header, list) or len(header) != 6:
            raise FrameError("header", "packages are malformed")
        single, whole, magnitudes = (TopK.read(part, reader) for part in header[:3])
        shapes, kernels = single.shapes, whole.shapes
        reader.spend(4 * sum(math.prod(shape) for shape in kernels.values()))  # of their sum
        if (single.depth, whole.depth, magnitudes.depth) != (ALL, 2, ALL) or any(
            value.dtype != torch.float32 for part in (single, whole, magnitudes) for value in part.values.values()
        ):
            raise FrameError("type", "packages are not of single float32 values and of kernels")
        if any(shapes.get(name) != shape or not kernel_size(shape) for name, shape in kernels.items()) or (
            magnitudes.shapes != {name: shape[:2] for name, shape in kernels.items()}
        ):
            raise FrameError("layout", "packages of kernels do not fit the convolutions")
        count, total = header[3], sum(len(index) for index in magnitudes.indices.values())
        if type(count) is not int or not 0 <= count <= MOST_PATTERNS:
            raise FrameError("header", "packages have too many patterns")
        patterns = reader.numbers(header[4], torch.int64, [count], [None])
        which = reader.numbers(header[5], torch.uint8, [total], [None])
        longest = max((kernel_size(kernels[n]) for n, index in magnitudes.indices.items() if len(index)), default=0)
        if longest > LONGEST or int(which.max() if total else -1) >= count:
            raise FrameError("coding", "a kernel's pattern is not among those sent")
        return cls(single, whole, magnitudes, patterns, which)

    def states(self) -> State:
        """The tensors, zero where no package has a value."""
        return self._dense

    def numbers(self) -> State:
        """All values, and the sum of the largest two: a value may be both single and in a kernel."""
        found = dict(self.single.values)
        for name, kernels in self.whole.values.items():
            both = [part.flatten() for part in (found[name], kernels) if part.numel()]
            greatest = [torch.stack([part.abs().max() for part in both]).sum(0, keepdim=True)] if both else []
            found[name] = torch.cat([*both, *greatest, self.magnitudes.values[name].flatten()])
        return found

    def counted(self) -> Counted:
        """The papers' count of single values, whole kernels and magnitudes."""
        return self.single.counted() + self.whole.counted() + self.magnitudes.counted()

    @staticmethod
    def describe(header: Any) -> list[str]:
        """Its entries, and how it is coded."""
        parts = zip(("single values", "whole kernels", "magnitudes"), header, strict=False)
        return [f"{what}: {line}" for what, part in parts for line in TopK.describe(part)]


def kernel_size(shape: tuple[int, ...]) -> int:
    """Number of values in each kernel of a convolution's weight; 0 for tensors without kernels, or with 1x1 kernels."""
    size = math.prod(shape[2:])
    return size if size > 1 else 0


def signs(codes: Tensor, n: int) -> Tensor:
    """1 and -1, shape (k, n), from the lowest n bits of codes (k,)."""
    return ((codes[:, None] >> torch.arange(n)) & 1).float() * 2 - 1
