"""All uses of Flower's undocumented parts; no other module imports them.

Each may change with any version. `docs/flower-private.md` says what each is for and what would replace it;
`tests/flower/test_private.py` says which a version has changed.
"""

import importlib
from typing import Any


def replaced(module: str, name: str, by: Any) -> Any:
    """Replace a module's attribute; returns the old value. Raises AttributeError if there is none."""
    owner = importlib.import_module(module)
    before = getattr(owner, name)
    setattr(owner, name, by)
    return before
