"""Default names of models."""

from __future__ import annotations

SMALL_RESNET = "resnet8:width=8,stem=3x3"
"""A model for images of any size that every method can train."""


def default_model(shape: tuple[int, ...]) -> str:
    """The default model for samples of `shape`: `mlp` for flat samples and images under 16 pixels, else `cnn4`."""
    return "cnn4" if len(shape) == 3 and min(shape[1:]) >= 16 else "mlp"


def convolutional(name: str, shape: tuple[int, ...]) -> str:
    """`name`, but a small ResNet in place of `mlp` if samples of `shape` are images."""
    return SMALL_RESNET if len(shape) == 3 and name == "mlp" else name
