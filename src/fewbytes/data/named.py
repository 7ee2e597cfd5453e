"""Samples of several tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbytes.base.errors import UserError


@dataclass(frozen=True)
class NamedTensors:
    """Samples of several tensors (n, …), by the names of a model's arguments; indexed by rows like one tensor.

    Its shape and type are the first tensor's. Raises UserError for no tensor, and for different numbers of samples.
    """

    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        if len({len(value) for value in self.tensors.values()}) != 1:
            sizes = ", ".join(f"{name} {len(value)}" for name, value in self.tensors.items())
            raise UserError(f"samples of several tensors need equal numbers of rows, not {sizes or 'no tensor'}")

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, rows: slice | Tensor) -> NamedTensors:
        return self._each(lambda value: value[rows])

    @property
    def _first(self) -> Tensor:
        return next(iter(self.tensors.values()))

    @property
    def shape(self) -> torch.Size:
        """(n, …), of the first tensor."""
        return self._first.shape

    @property
    def dtype(self) -> torch.dtype:
        """The first tensor's."""
        return self._first.dtype

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self._first.device

    def is_floating_point(self) -> bool:
        """Whether all are floats."""
        return all(value.is_floating_point() for value in self.tensors.values())

    def to(self, device: str | torch.device) -> NamedTensors:
        """A copy on a device."""
        return self._each(lambda value: value.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> NamedTensors:
        return NamedTensors({name: change(value) for name, value in self.tensors.items()})


def one_tensor(x: Tensor | NamedTensors) -> Tensor:
    """Samples as a single tensor. Raises UserError for several."""
    if isinstance(x, NamedTensors):
        raise UserError(
            f"samples are of several tensors ({', '.join(x.tensors)}), but one is needed: leave transforms out, and "
            "use a method that does not process samples itself, such as fedavg"
        )
    return x
