"""Protocols for a problem's initial weights and adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import nn

from fewbytes.base.state import State


class Adapters(Protocol):
    """Adapters trained instead of a model's weights, such as `fewbytes.models.adapters.Adapters`."""

    @property
    def own(self) -> bool:
        """Whether every client keeps some of the trained entries, which are never sent."""

    def added(self, model: nn.Module, head: bool) -> nn.Module:
        """Add adapters to `model` in place, freeze all else except, with `head`, its last layer, and return it."""


class Weights(Protocol):
    """The entries of a weights file, such as `fewbytes.models.pretrained.Pretrained`."""

    @property
    def name(self) -> str:
        """The file's name."""

    @property
    def entries(self) -> State:
        """The tensors by name."""

    @property
    def digest(self) -> str:
        """Equal for equal entries."""

    def into(self, model: nn.Module) -> None:
        """Copy the fitting entries into the model."""

    def fitting(self, model: nn.Module) -> State:
        """The entries that the model has, by its names."""

    def left(self, model: nn.Module) -> Iterator[str]:
        """A message that names the model's entries missing in the file, if there are any."""
