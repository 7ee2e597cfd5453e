"""The package's modules, and what each imports."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

import fewbytes

SOURCE = Path(fewbytes.__file__).parent


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(("fewbytes", *(part for part in parts if part != "__init__")))


MODULES = {name_of(path): path for path in SOURCE.rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions and for types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in whole}
    return found


def closure(module: str, within: Collection[str]) -> set[str]:
    """A module and all it imports, directly or not, of those `within`."""
    found, left = set[str](), {module}
    while left:
        found |= left
        left = {each for name in left for each in imports_of(MODULES[name]) if each in within} - found
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""
