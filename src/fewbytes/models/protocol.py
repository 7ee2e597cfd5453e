"""What a problem holds of models besides their builder: weights that they start from, and adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import nn

from fewbytes.base.state import State


class Adapters(Protocol):
    """What is trained in place of a model, such as `fewbytes.models.adapters.Adapters`."""

    def added(self, model: nn.Module, head: bool) -> nn.Module:
        """The model with adapters, all else frozen but, with `head`, its last layer. Changes `model`."""


class Weights(Protocol):
    """The entries of a file of weights, such as `fewbytes.models.pretrained.Pretrained`."""

    @property
    def name(self) -> str:
        """The file's."""

    @property
    def entries(self) -> State:
        """All of them."""

    @property
    def digest(self) -> str:
        """Equal for equal entries."""

    def into(self, model: nn.Module) -> None:
        """Copy the entries that fit into the model's."""

    def fitting(self, model: nn.Module) -> State:
        """The entries that the model has, by its names."""

    def left(self, model: nn.Module) -> Iterator[str]:
        """For people: a line of what the model has that the file does not give, if there is any."""
