"""Code and files that settings name: the user may name any, a file or another machine only allowed ones."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from fewbytes.base.errors import UserError


class _Allowed(NamedTuple):
    """What may be named: modules, `package.module:attribute` and, unless `anywhere`, folders besides FEWBYTES_DATA."""

    names: tuple[str, ...]
    anywhere: bool


_allowed: ContextVar[_Allowed | None] = ContextVar("allowed", default=None)  # None: the user chose the names


@contextmanager
def only_allowed(*names: str, anywhere: bool = True) -> Iterator[None]:
    """Names inside the block come from a file or another machine. Of the user's code only `names` can be imported:
    modules (with their submodules) or `package.module:attribute`. Unless `anywhere`, files and folders must be under
    FEWBYTES_DATA or in folders among the `names`. A nested block also allows its parent's names.
    """
    outer = _allowed.get() or _Allowed((), True)
    given = tuple(name for name in names if name)
    token = _allowed.set(_Allowed(outer.names + given, outer.anywhere and anywhere))
    try:
        yield
    finally:
        _allowed.reset(token)


def allowed_names() -> tuple[str, ...] | None:
    """The names that the block allows, for another process's `only_allowed`; None: any."""
    return None if (allowed := _allowed.get()) is None else allowed.names


MODULES = "FEWBYTES_MODULES"
"""Environment variable, also read by child processes: the folder in which named modules may be."""


def look_in(folder: str) -> None:
    """Allow named modules in this folder, too. It is added to the end of Python's path, and only when a module in it is
    named: an untrusted folder may have a torch.py."""
    os.environ[MODULES] = folder


def imported(name: str) -> Any:
    """The object that `package.module:attribute` names. Raises UserError if the name is not allowed here or another
    module has the same name, and any error of the import."""
    module, _, attribute = name.partition(":")
    allowed = _allowed.get()
    if allowed is not None and not any(one in (module, name) or module.startswith(f"{one}.") for one in allowed.names):
        raise UserError(
            f"{name!r} is code that a file or a server names, not you: it is not imported. If you trust it, allow "
            f"{module} (--allow on the command line, allow= in a node's configuration)"
        )
    place = os.environ.get(MODULES, "")
    within = Path(place, *module.split("."))
    here = [
        each for each in (within.with_name(f"{within.name}.py"), within / "__init__.py") if place and each.is_file()
    ]
    if here and place not in sys.path:
        sys.path.append(place)
    found = importlib.import_module(module)
    if here and (of := getattr(found, "__file__", None)) and not Path(of).is_relative_to(place):
        raise UserError(f"there is {here[0]}, and another module {module} ({of}): rename yours")
    return getattr(found, attribute)


def places(name: str) -> list[Path]:
    """Possible paths of a file or folder: under FEWBYTES_DATA, else the path itself. Raises UserError if a server names
    one that is neither under FEWBYTES_DATA nor allowed here."""
    root = os.environ.get("FEWBYTES_DATA")
    found = [*([Path(root).expanduser() / name] if root else []), Path(name).expanduser()]
    if elsewhere() and not _is_allowed(name):
        above = None if root is None else Path(os.path.abspath(Path(root).expanduser()))
        found = [each for each in found if above in Path(os.path.abspath(each)).parents]
        if not found:
            raise UserError(_not_here(name))
    return found


def check_fetched(name: str) -> None:
    """Raises UserError if a server or a file names something to download from the hub that is not allowed here: the
    name's owner on the hub would learn who reads the file."""
    if elsewhere() and not _is_allowed(name):
        raise UserError(_not_here(name))
    if _allowed.get() is not None and not _is_allowed(name):
        raise UserError(
            f"{name!r}, which a file names, not you, is not here and would be fetched from the hub: if you trust the "
            f"file, allow that (--allow {name})"
        )


def check_address(address: str) -> None:
    """Raises UserError if a file names another machine to connect to, and the user did not."""
    if (allowed := _allowed.get()) is not None and address not in allowed.names:
        raise UserError(
            f"{address!r} is a machine that a file names, not you: nothing is sent there. If you trust it, name it "
            f"again, or allow it (--allow {address})"
        )


def elsewhere() -> bool:
    """Whether the names come from a server, so that errors must not reveal which other files are here."""
    return (allowed := _allowed.get()) is not None and not allowed.anywhere


def _is_allowed(name: str) -> bool:
    names = (_allowed.get() or _Allowed((), True)).names
    whole = Path(os.path.abspath(Path(name).expanduser()))
    return name in names or any(whole.is_relative_to(one) for one in names if Path(one).is_absolute())


def _not_here(name: str) -> str:
    return (
        f"the server names {name!r}, which is not under FEWBYTES_DATA here: put it there, or allow it (allow= in this "
        "node's configuration)"
    )
