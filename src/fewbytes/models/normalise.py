"""Normalisation of samples inside a model, whose inputs stay unnormalised: images in 0..1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fewbytes.models.normalisation import Normalisation


class Normalise(nn.Module):
    """Normalises samples (n, channels, …); nothing in it is trained, saved or sent."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        self.mean: Tensor
        self.std: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Samples to normalised samples, (n, channels, …)."""
        return (x - self.mean) / self.std


def with_normalisation(model: nn.Module, how: Normalisation, dimensions: int) -> nn.Module:
    """Add the normalisation of samples with this number of dimensions to the model; its names and parameters stay.

    Its units (`fewbytes.models.blocks`) normalise, too.
    """
    shape = (1, -1, *[1] * (dimensions - 1))  # (1, channels, 1, …)
    model.register_buffer("normalise_mean", torch.tensor(how.mean).view(shape), persistent=False)
    model.register_buffer("normalise_std", torch.tensor(how.std).view(shape), persistent=False)
    model.register_forward_pre_hook(_normalised)
    return model


def units_with_normalisation(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The units of a model; if the model normalises samples, so does the first."""
    if not hasattr(model, "normalise_mean"):
        return units
    first, unit = next(iter(units.items()))
    return units | {first: nn.Sequential(Normalise(model.normalise_mean, model.normalise_std), unit)}  # type: ignore[arg-type]


def _normalised(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return ((inputs[0] - model.normalise_mean) / model.normalise_std, *inputs[1:])
