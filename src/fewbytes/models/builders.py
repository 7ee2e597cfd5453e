"""Functions that make models."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn


def takes_argument(build: Callable[..., nn.Module]) -> bool:
    """Whether a model builder wants the client's id: it has a parameter that must be given."""
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
