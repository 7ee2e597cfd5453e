"""The methods, one file per paper.

The file NAME.py holds one method: the class whose name, in lower case, is NAME. The command line, config files and
results use NAME. A file added here is listed and run like the others. Code that several methods share is in `parts`.

Other packages add methods by entry points of the group `fewbytes.methods`, named in the same way. Any other class can
be named as `package.module:Class`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from fewbytes.base.errors import MethodError, UserError, import_failed, suggestion
from fewbytes.base.named import imported
from fewbytes.core.class_checks import check_class
from fewbytes.core.method import Method

FILES = [found.name for found in pkgutil.iter_modules(__path__) if not found.ispkg]
"""The names of built-in methods."""
WITHOUT_TRAINING = ("survey", "evaluation")
"""The names of exchanges that train nothing: they have commands of their own, and no list of methods has them."""


class _Methods(Mapping[str, type[Method]]):
    """Every method by its name, imported on access. Raises UserError if the import fails."""

    def __getitem__(self, name: str) -> type[Method]:
        added = _added().get(name, [])
        if len(added) + (name in FILES) > 1:
            packages = [*(["fewbytes"] if name in FILES else []), *map(_package, added)]
            raise UserError(f"{' and '.join(packages)} each have a method {name!r}: uninstall one")
        if name in FILES:
            return _checked(name, _in_file(importlib.import_module(f"{__name__}.{name}"), name))
        if not added:
            raise KeyError(name)
        found = _checked(name, _loaded(name, added[0].module, added[0].load))
        if short_name(found.__name__) != name:
            raise UserError(f"{_package(added[0])} names {found.__name__} {name!r}: it is {short_name(found.__name__)}")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*FILES, *_added()}))

    def __len__(self) -> int:
        return len({*FILES, *_added()})

    def __contains__(self, name: object) -> bool:
        return name in FILES or name in _added()


METHODS: Mapping[str, type[Method]] = _Methods()
"""Every method by its name on the command line, in alphabetical order."""


def canonical(name: str) -> str:
    """The name in METHODS that differs only in case, dashes and underscores, as FedAvg and LG-FedAvg do; another name
    as it is."""
    if name in METHODS:
        return name
    return next((each for each in METHODS if _folded(each) == _folded(name)), name)


def _folded(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def method_class(name: str) -> type[Method]:
    """The method class of a name in METHODS (`canonical`), or of `package.module:Class`. Raises UserError if there is
    none."""
    name = canonical(name)
    module, colon, _ = name.partition(":")
    if colon:
        return _checked(name, _loaded(name, module, lambda: imported(name)))
    if name in WITHOUT_TRAINING:
        return _checked(name, _in_file(importlib.import_module(f"{__name__}.{name}.{name}"), name))
    if name not in METHODS:
        raise UserError(
            f"unknown method {name!r}{suggestion(name, METHODS)}; `fewbytes methods` lists them; name your own as "
            "package.module:Class"
        )
    return METHODS[name]


def short_name(name: str) -> str:
    """The name of a method in results and run folders: without its module, in lower case."""
    return name.rpartition(":")[2].lower()


def registered(method: Method) -> str:
    """The name by which a method is listed; `module:Class` of one that is not in METHODS, whatever its class's name."""
    kind = type(method)
    name = short_name(kind.__name__)
    ours = kind.__module__.startswith(f"{__name__}.")
    if ours or (name in METHODS and METHODS[name] is kind):
        return name
    return f"{kind.__module__}:{kind.__qualname__}"


def _added() -> dict[str, list[EntryPoint]]:
    """The entry points of installed packages by name."""
    return _added_from(tuple(sys.path))


@functools.cache  # reads the files of all packages
def _added_from(places: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for each in entry_points(group="fewbytes.methods"):
        found.setdefault(each.name, []).append(each)
    return found


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.module


def _in_file(module: ModuleType, name: str) -> Any:
    """The method class in a module of this package."""
    for key, value in vars(module).items():
        if key.lower() == name and isinstance(value, type):
            return value
    raise UserError(f"{module.__file__} holds no method: name its class {name}, in any case")


def _loaded(name: str, module: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except UserError:
        raise
    except AttributeError as error:
        close = suggestion(name.partition(":")[2], dir(error.obj)) if error.obj is not None else ""
        raise UserError(f"the method {name!r} cannot be imported: {import_failed(error, module)}{close}") from error
    except Exception as error:  # importing runs the user's code
        raise UserError(f"the method {name!r} cannot be imported: {import_failed(error, module)}") from error


def _checked(name: str, found: Any) -> type[Method]:
    """The class, if it is a usable method. Raises UserError."""
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserError(f"{name!r} is not a method: derive its class from fewbytes.Method")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise UserError(f"the method {name!r} lacks {', '.join(missing)}")
    try:
        check_class(found, Method)
    except MethodError as error:
        raise UserError(f"the method {name!r} cannot be used: {error}") from None
    if needed := [key for key, default in found.defaults().items() if default is dataclasses.MISSING]:
        raise UserError(
            f"the method {name!r} has no default for {', '.join(needed)}: a method must run without options"
        )
    return found


def __getattr__(name: str) -> type[Method]:
    """A method's class: `from fewbytes.methods import FedAvg`."""
    if (file := name.lower()) in FILES:
        found = vars(importlib.import_module(f"{__name__}.{file}")).get(name)
        if inspect.isclass(found) and issubclass(found, Method):
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
