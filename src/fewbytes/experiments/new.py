"""Writes the files of a new method (code, test case, page), or of a new project."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from fewbytes.base.errors import UserError
from fewbytes.base.files import replacing


def new_method(title: str, folder: Path) -> tuple[str, list[Path]]:
    """Write the files of a method called `title`, which runs as it is. Returns its name for `fewbytes run`, and the
    files.

    In a checkout of this project the files go where all methods' are, otherwise into `folder`. Raises UserError for a
    name that is invalid or taken, and a file that exists.
    """
    from fewbytes.methods import METHODS, short_name  # needs torch, which a project does not

    name = short_name(title)
    if not (title.isidentifier() and title.isascii()) or keyword.iskeyword(name) or keyword.iskeyword(title):
        raise UserError(f"{title!r} cannot be the name of a class: use letters, digits and _, as in FedSAM")
    if name in METHODS:
        raise UserError(f"there is a method {name!r} already: choose another name")
    if root_of(folder) is None and (name in sys.stdlib_module_names or find_spec(name) is not None):
        raise UserError(f"there is a module {name!r} already, which {name}.py would hide: choose another name")
    class_name = title if title != name else title.capitalize()
    root = root_of(folder)
    if root is not None:
        method, tests, page = (
            root / "src/fewbytes/methods" / f"{name}.py", root / "tests/cases" / f"{name}.py",
            root / "docs/methods" / f"{name}.md",
        )  # fmt: skip
        called, beside = name, "case"
    else:
        method, tests, page = folder / f"{name}.py", folder / f"test_{name}.py", folder / f"{name}.md"
        called, beside = f"{name}:{class_name}", "test"
    made = {method: "method", tests: beside, page: "page"}
    for path in made:
        if path.exists():
            raise UserError(f"{path} exists and is not overwritten: choose another name")
    words = {"name": name, "class": class_name}
    words |= {"file": _within(root, method), "tests": _within(root, tests)}
    _write(made, words)
    return called, list(made)


def new_project(title: str, folder: Path) -> list[Path]:
    """Write a folder with a data module, a model, a config, a test and a README, which run as they are.

    Raises UserError for an invalid name, and a folder that exists.
    """
    name = title.lower().replace("-", "_")
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
        raise UserError(f"{title!r} cannot be the name of a project: use letters, digits, - and _, as in my-hospitals")
    place = folder / title
    if place.exists():
        raise UserError(f"{place} exists and is not overwritten: choose another name")
    made = {
        f"{name}_data.py": "data",
        f"{name}_model.py": "model",
        "config.toml": "config",
        f"test_{name}.py": "test",
        "README.md": "readme",
    }
    paths = {place / file: f"project/{kind}" for file, kind in made.items()}
    _write(paths, {"name": name})
    return list(paths)


def _write(made: Mapping[Path, str], words: Mapping[str, str]) -> None:
    """Write each file from its template."""
    for path, kind in made.items():
        template = Template((files("fewbytes.experiments") / "templates" / f"{kind}.txt").read_text("utf-8"))
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(template.substitute(words).encode())


def root_of(folder: Path) -> Path | None:
    """The checkout of this project that a folder lies in."""
    return next((place for place in (folder, *folder.absolute().parents) if _is_ours(place)), None)


def _is_ours(place: Path) -> bool:
    """Whether this is a checkout of the project."""
    return (place / "src/fewbytes/methods/__init__.py").is_file() and (place / "tests/cases").is_dir()


def _within(root: Path | None, path: Path) -> str:
    return path.name if root is None else path.relative_to(root).as_posix()
