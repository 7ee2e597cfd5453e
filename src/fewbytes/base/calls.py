"""Signatures of users' functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def takes_argument(function: Callable[..., Any]) -> bool:
    """Whether a function needs the client's id: it has a parameter without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
