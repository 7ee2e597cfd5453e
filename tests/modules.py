"""The package's modules, what each imports, and packages that some tests need."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Collection
from pathlib import Path

import pytest

import fewbytes

SOURCE = Path(fewbytes.__file__).parent


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(("fewbytes", *(part for part in parts if part != "__init__")))


MODULES = {name_of(path): path for path in SOURCE.rglob("*.py")}
DOCUMENTED = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation"}
"""The modules of Flower's API reference that the package uses."""
PRIVATE = "fewbytes.flower.private"
"""The package that may use other parts of Flower, and private ones of Ray."""


@functools.cache
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


def parts_of(path: Path) -> set[str]:
    """`module.name` of all that a file imports, also as text: `import_module("…")`, `replaced("module", "name")`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "replaced"):
            names = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            found.add(".".join(map(str, names)))
    return found


def private_parts(module: str) -> set[str]:
    """What a module imports of Flower, and of Ray, that these do not document."""
    parts = {each for each in parts_of(MODULES[module]) if re.match(r"flwr\b|ray\._|ray\.core\b", each)}
    return {each for each in parts if each.rpartition(".")[0] not in DOCUMENTED}


def closure(module: str, within: Collection[str]) -> set[str]:
    """A module and all it imports, directly or not, of those `within`."""
    found, left = set[str](), {module}
    while left:
        found |= left
        left = {each for name in left for each in imports_of(MODULES[name]) if each in within} - found
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def needs(*packages: str) -> None:
    """Skips a file of tests where one of `packages` is not installed, and imports none: collecting tests is quick."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)
