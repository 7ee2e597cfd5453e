"""Functions that make models, and names of models that suit."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn

SMALL_RESNET = "resnet8:width=8,stem=3x3"
"""For images of any size, a model that every method can train."""


def takes_argument(build: Callable[..., nn.Module]) -> bool:
    """Whether a model builder wants the client's id: it has a parameter that must be given."""
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def default_model(shape: tuple[int, ...]) -> str:
    """The name of a model that suits samples of `shape`: `mlp` for flat ones or under 16 pixels, else `cnn4`."""
    return "cnn4" if len(shape) == 3 and min(shape[1:]) >= 16 else "mlp"


def convolutional(name: str, shape: tuple[int, ...]) -> str:
    """The name of a default model for samples of `shape`; for images one with convolutions in place of `mlp`."""
    return SMALL_RESNET if len(shape) == 3 and name == "mlp" else name
