"""Packages whose public names are imported when the first of them is used: the command line's help needs no torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def names_of(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose module `names` imports all that is public and lists it in `__all__`."""

    def find(name: str) -> Any:
        names, here = importlib.import_module(f"{package}.names"), vars(sys.modules[package])
        if name == "__all__" or name in names.__all__:
            return getattr(names, name)
        if name in here:  # a module of the package's, which has been imported now
            return here[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
