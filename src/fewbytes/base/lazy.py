"""Packages that import their public names on first use: the command line's help needs no torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def names_of(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose module `names` imports and lists everything public."""

    def get(name: str) -> Any:
        names, here = importlib.import_module(f"{package}.names"), vars(sys.modules[package])
        if name == "__all__" or name in names.__all__:
            return getattr(names, name)
        if name in here:  # a module of the package, imported by now
            return here[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *get("__all__")})

    return get, listed
