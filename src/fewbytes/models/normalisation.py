"""The setting for the normalisation of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Self

from fewbytes.base.errors import UserError

IMAGENET = "0.485,0.456,0.406/0.229,0.224,0.225"  # for torchvision's pretrained models
DATA = "data"


@dataclass(frozen=True)
class Normalisation:
    """(x - mean) / std for each channel of a sample, its first dimension, or with one value for all channels. `name`:
    imagenet, or data if the values are not known yet."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    name: str = ""

    @classmethod
    def read(cls, text: str) -> Self:
        """From `imagenet`, `data`, or MEAN/STD with a number for each channel, or one for all. Raises UserError."""
        if text == DATA:
            return cls(name=DATA)
        named = text == "imagenet"
        try:
            mean, std = (
                tuple(float(number) for number in part.split(",")) for part in (IMAGENET if named else text).split("/")
            )
        except ValueError:
            raise UserError(
                f"normalise is imagenet, data, or MEAN/STD of channels, like 0.5,0.5,0.5/0.25,0.25,0.25, not {text!r}"
            ) from None
        if not all(isfinite(number) for number in mean) or not all(0 < number < float("inf") for number in std):
            raise UserError(f"normalise {text}: means are finite, and standard deviations above 0")
        return cls(mean, std, text if named else "")

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float]) -> Self:
        """Rounded to six digits, so that results agree on all machines; the standard deviation of a constant channel
        becomes 1."""
        rounded = [tuple(float(f"{number:.6g}") for number in numbers) for numbers in (mean, std)]
        return cls(rounded[0], tuple(number or 1.0 for number in rounded[1]))

    def __str__(self) -> str:
        return self.name or "/".join(",".join(map(_figure, numbers)) for numbers in (self.mean, self.std))

    @property
    def of_data(self) -> bool:
        """Whether its values are computed from the data."""
        return self.name == DATA

    def on(self, channels: int) -> Self:
        """The values for each of `channels` channels. Raises UserError if their number differs."""
        for numbers in (self.mean, self.std):
            if len(numbers) not in (1, channels):
                raise UserError(f"normalise {self} is for {len(numbers)} channels, and samples here have {channels}")
        mean, std = (numbers * channels if len(numbers) == 1 else numbers for numbers in (self.mean, self.std))
        return type(self)(mean, std)


def _figure(number: float) -> str:
    short = f"{number:.6g}"
    return short if float(short) == number else repr(number)
