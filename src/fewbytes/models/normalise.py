"""Normalisation of samples as part of a model, which goes on taking them as they are: images in 0..1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from fewbytes.base.errors import UserError

IMAGENET = "0.485,0.456,0.406/0.229,0.224,0.225"  # of torchvision's pretrained models


@dataclass(frozen=True)
class Normalisation:
    """(x - mean) / std, for every channel of a sample: its first dimension."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(cls, text: str, channels: int) -> Normalisation:
        """From `imagenet`, or MEAN/STD with a number for each channel, or one for all. Raises UserError."""
        try:
            mean, std = (
                [float(number) for number in part.split(",")]
                for part in (IMAGENET if text == "imagenet" else text).split("/")
            )
        except ValueError:
            raise UserError(
                f"normalise is imagenet, data, or MEAN/STD of channels, like 0.5,0.5,0.5/0.25,0.25,0.25, not {text!r}"
            ) from None
        if not all(isfinite(number) for number in mean) or not all(0 < number < float("inf") for number in std):
            raise UserError(f"normalise {text}: means are finite, and standard deviations above 0")
        for numbers in (mean, std):
            if len(numbers) not in (1, channels):
                raise UserError(f"normalise {text} is for {len(numbers)} channels, and samples here have {channels}")
        return cls(*(tuple(numbers * channels if len(numbers) == 1 else numbers) for numbers in (mean, std)))

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float]) -> Normalisation:
        """By these figures, to six digits, so that they are the same wherever they were computed; a channel that never
        changes is divided by 1."""
        rounded = [tuple(float(f"{number:.6g}") for number in numbers) for numbers in (mean, std)]
        return cls(rounded[0], tuple(number or 1.0 for number in rounded[1]))

    def __str__(self) -> str:
        return "/".join(",".join(f"{number:.6g}" for number in numbers) for numbers in (self.mean, self.std))

    def tensors(self, dimensions: int) -> tuple[Tensor, Tensor]:
        """mean and std (1, channels, 1, …), for samples of so many dimensions."""
        shape = (1, -1, *[1] * (dimensions - 1))
        return torch.tensor(self.mean).view(shape), torch.tensor(self.std).view(shape)


class Normalise(nn.Module):
    """Samples (n, channels, …) normalised; nothing of it is learnt, saved or sent."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        self.mean: Tensor
        self.std: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        return (x - self.mean) / self.std


def with_normalisation(model: nn.Module, how: Normalisation, dimensions: int) -> nn.Module:
    """The model, which normalises samples of so many dimensions before it uses them: names, class and parameters stay.

    Its units (`fewbytes.models.blocks`) do so too.
    """
    for name, value in zip(("normalise_mean", "normalise_std"), how.tensors(dimensions), strict=True):
        model.register_buffer(name, value, persistent=False)
    model.register_forward_pre_hook(_normalised)
    return model


def units_with_normalisation(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The units of a model, the first of which normalises samples if the model does."""
    if not hasattr(model, "normalise_mean"):
        return units
    first, unit = next(iter(units.items()))
    return units | {first: nn.Sequential(Normalise(model.normalise_mean, model.normalise_std), unit)}  # type: ignore[arg-type]


def _normalised(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return ((inputs[0] - model.normalise_mean) / model.normalise_std, *inputs[1:])
