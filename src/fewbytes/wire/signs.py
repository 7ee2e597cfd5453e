"""Signs: the sign of every value of a state, and one magnitude for all of them."""

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
from fewbytes.wire import words
from fewbytes.wire.value import Counted, Reader, Writer


@dataclass(frozen=True, eq=False)
class Signs:
    """Named float32 tensors as scale * sign. Papers count one bit a value and four bytes for the scale.

    `signs[name]`: int8, -1, 0 or 1; `scale`: float32 (1,). Zeros of either sign stay zeros: a mask of them travels,
    which takes a few bytes if there are none. `of` is the lossy step.
    """

    signs: State
    scale: Tensor

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> Self:
        """Scaled sign, C(x) = (||x||_1 / d) sign(x), of all values of the state as one vector x of d.

        A NaN has sign 0 and makes the scale NaN.

        >>> import fewbytes as fb
        >>> import torch
        >>> fb.Signs.of({"w": torch.tensor([1.0, -2.0, 0.0, 5.0])}).dense()
        {'w': tensor([ 2., -2.,  0.,  2.])}
        """
        values = {name: value.detach().cpu() for name, value in state.items()}
        norm = sum(float(value.abs().sum(dtype=torch.float64)) for value in values.values())
        size = sum(value.numel() for value in values.values())
        return cls(
            {name: (value > 0).to(torch.int8) - (value < 0).to(torch.int8) for name, value in values.items()},
            torch.tensor([norm / max(1, size)], dtype=torch.float64).float(),
        )

    @cached_property
    def _dense(self) -> State:
        return {name: sign * self.scale for name, sign in self.signs.items()}

    def dense(self) -> State:
        """The tensors by name (a fresh dict; the tensors are kept and shared)."""
        return dict(self._dense)

    def write(self, writer: Writer) -> Any:
        """Write a mask of non-zeros, and one of the positive among them; the header is [entries, both, scale]."""
        header, entries = writer.entries({name: torch.empty(()).expand(s.shape) for name, s in self.signs.items()})
        signs = np.concatenate([self.signs[e.name].numpy().reshape(-1) for e in entries] or [np.zeros(0, np.int8)])
        signed = signs != 0
        return [header, writer.bits(signed), writer.bits(signs[signed] > 0), writer.numbers([self.scale], [None])]

    @classmethod
    def read(cls, header: Any, reader: Reader) -> Self:
        """Raises FrameError for entries other than float32."""
        if not isinstance(header, list) or len(header) != 4:
            raise FrameError("header", "signs are malformed")
        entries = reader.entries(header[0])
        if any(entry.dtype != "float32" for entry in entries):
            raise FrameError("type", "signs must represent float32 values")
        reader.spend_dense(entries)
        sizes = [entry.size for entry in entries]
        signed = reader.bits(header[1], sum(sizes))
        signs = signed.astype(np.int8)
        signs[signed] = 2 * reader.bits(header[2], int(signed.sum())).view(np.int8) - 1
        parts = torch.from_numpy(signs).split(sizes)
        return cls(
            {entry.name: part.view(entry.shape) for entry, part in zip(entries, parts, strict=True)},
            reader.numbers(header[3], torch.float32, [1], [None]),
        )

    def states(self) -> State:
        """The tensors, scale * sign."""
        return self._dense

    def numbers(self) -> State:
        """The scale."""
        return {"scale": self.scale}

    def counted(self) -> Counted:
        """The scale's bytes, and one bit for every value."""
        return Counted(self.scale.nbytes, sum(sign.numel() for sign in self.signs.values()))

    @staticmethod
    def describe(header: Any) -> list[str]:
        """Its entries, and how it is coded."""
        entries, signed, positive, _ = header
        counts = f"{positive[3]:,} positive of {signed[3]:,} that are not zero"
        return [*words.entries(entries), f"signs: {counts}, and a scale"]
