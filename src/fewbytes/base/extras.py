"""Checks for optional packages; the error names the extra that installs a missing one."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from fewbytes.base.errors import UserError


def needs(what: str, extra: str, *packages: str) -> None:
    """Raises UserError if one of the packages is missing; `what` is the feature that needs them, in words."""
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        raise UserError(f"{what} needs {' and '.join(missing)}: pip install 'fewbytes[{extra}]'")


def is_installed(package: str) -> bool:
    """Whether a package is installed; nothing is imported."""
    return sys.modules[package] is not None if package in sys.modules else find_spec(package) is not None
