"""What is imported at the start is declared: what only comes along with another package may be missing elsewhere."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normalised(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def imported() -> dict[str, str]:
    """Packages that modules import outside of functions, but Python's own, and a file that does. Left out are the rooms
    for Flower and NVFlare, which are imported only with these, and with what comes along with them."""
    found: dict[str, str] = {}
    rooms = [path for path in (ROOT / "src" / "fewbytes").iterdir() if path.name not in ("flower", "nvflare")]
    for path in sorted(file for room in rooms for file in (room.rglob("*.py") if room.is_dir() else [room])):
        for node in ast.parse(path.read_text("utf-8")).body if path.suffix == ".py" else []:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            found |= {name.partition(".")[0]: path.name for name in names}
    return {name: file for name, file in found.items() if name not in sys.stdlib_module_names | {"fewbytes"}}


def test_every_imported_package_is_declared():
    declared = {normalised(each) for each in DECLARED["dependencies"]}
    declared |= {normalised(each) for extra in DECLARED["optional-dependencies"].values() for each in extra}
    owners = importlib.metadata.packages_distributions()
    missing = {
        name: file for name, file in imported().items()
        if name in owners and not {normalised(owner) for owner in owners[name]} & declared
    }  # fmt: skip
    assert not missing
    assert {"torch", "typer", "rich"} <= imported().keys()
