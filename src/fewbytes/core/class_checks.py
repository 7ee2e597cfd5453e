"""Checks of a method's class, when it is first used: errors, and likely authoring errors."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fewbytes.base.errors import LikelyMistake, MethodError
from fewbytes.core.network import hints_of
from fewbytes.core.promises import Promises

PROMISED = frozenset(each.name for each in dataclasses.fields(Promises))
CLOSE = 0.8  # difflib's cutoff: `global_modell` and `clients` are close enough to the correct names


@functools.cache
def check_class(cls: type, base: type) -> None:
    """Raises MethodError for a class derived from `base` that no run can use; warns once of likely authoring errors."""
    _check_frozen(cls, base)
    _check_hooks(cls, base)
    for text in likely_mistakes(cls, base):
        warnings.warn(text, LikelyMistake, stacklevel=3)


def _check_frozen(cls: type, base: type) -> None:
    """Raises MethodError for a class that is not a frozen dataclass, or adds hyper-parameters without being one."""
    for each in (c for c in cls.__mro__ if issubclass(c, base) and c is not base):
        params = vars(each).get("__dataclass_params__")
        added = any("ClassVar" not in str(kind) for kind in inspect.get_annotations(each).values())
        must = added or params is not None or (each is cls and not dataclasses.is_dataclass(cls))
        if must and not (params and params.frozen):
            raise MethodError(
                f"{each.__name__} is not a frozen dataclass: write @dataclass(frozen=True) above class {each.__name__}"
            )


def _check_hooks(cls: type, base: type) -> None:
    """Raises MethodError for a class's replacement of a function or attribute of `base` that a run cannot use, and for
    types of hyper-parameters that cannot be resolved."""
    hints_of(cls, cls.__name__)
    for name, usual in vars(base).items():
        own = inspect.getattr_static(cls, name)
        if name.startswith("_") or own is usual or name in getattr(cls, "__dataclass_fields__", ()):
            continue
        within = f"{_file(cls)}{cls.__name__}.{name}"
        if inspect.isfunction(usual) and not _takes(own, usual.__code__.co_argcount):
            given = ", ".join(inspect.signature(usual).parameters)
            raise MethodError(f"{within} is a function that a run calls: write def {name}({given})")
        for kind, words in _KINDS.items():
            if isinstance(usual, kind) and not isinstance(own, kind) and not hasattr(own, "__get__"):
                raise MethodError(f"{within} must be {words}, not {own!r}")


def _takes(own: Any, count: int) -> bool:
    """Whether a class's replacement of a function can be called with `count` arguments; descriptors other than
    functions are accepted unchecked."""
    if not inspect.isfunction(own):
        return callable(own) or hasattr(own, "__get__")
    try:
        inspect.signature(own).bind(*[None] * count)
    except TypeError:
        return False
    return True


def likely_mistakes(cls: type, base: type) -> Iterator[str]:
    """A line for each likely error: an attribute named nearly like an unused one of `base` or a promise; an attribute
    without a type; and rebinding the `state` argument, which has no effect."""
    typed = inspect.get_annotations(cls)
    known = {name for name in dir(base) if not name.startswith("_")}
    parameters = {name for above in cls.__mro__[1:] for name in getattr(above, "__dataclass_fields__", ())}
    inherited = {name for above in cls.__mro__[1:] for name in vars(above)} - parameters
    for name, value in vars(cls).items():
        if name.startswith("_") or name in inherited:
            continue
        within = f"{_file(cls)}{cls.__name__}.{name}"
        is_code = inspect.isroutine(value) or isinstance(value, property | type)
        free = (known if is_code else known | PROMISED) - vars(cls).keys()
        fixed = name not in typed or "ClassVar" in str(typed[name])
        close = difflib.get_close_matches(name, free, n=1, cutoff=CLOSE) if is_code or fixed else []
        if name in PROMISED and fixed and not is_code:
            yield f"{within} means nothing to a run: write promises = Promises({name}=…)"
        elif close:
            meant = f"Promises({close[0]}=…)" if close[0] in PROMISED else close[0]
            yield f"{within} means nothing to a run: did you mean {meant}?"
        elif name not in typed and not is_code and not name.isupper():
            yield f"{within} has no type, so it is not a hyper-parameter: write {name}: {type(value).__name__} = …"
    for name, kind in typed.items():
        if name in known and "ClassVar" not in str(kind) and not hasattr(getattr(base, name), "__get__"):
            within = f"{_file(cls)}{cls.__name__}.{name}"
            yield f"{within} is not a hyper-parameter but a property of the method: write {name}: ClassVar[…] = …"
    for name, value in vars(cls).items():
        written = _written(value) if inspect.isfunction(value) else None
        if written is None:
            continue
        where = f"{place_of(value)}: {cls.__name__}.{name}"
        if (state := _state(name, value)) and _assigns(written, state):
            yield f"{where} rebinds `{state}` and loses the value when it returns: change its fields, {state}.… = …"
        if name in _GIVES and not _returns(value, written):
            yield f"{where} returns nothing: is `return` missing?"


_KINDS = {Promises: "Promises(…)", type: "a class"}
_GIVES = ("server", "client", "global_model", "local_model", "server_models")
_STATEFUL = ("start", "round", "finish", "join")


def called(functions: Iterable[Callable[..., Any]]) -> set[str]:
    """The names of handlers that functions call (`net.call(self.train, …)`, `tell`, `stream`), as far as their source
    can be read."""
    found = set()
    trees = [tree for function in functions if (tree := _written(function))]
    for node in itertools.chain.from_iterable(map(ast.walk, trees)):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="call" | "tell" | "stream"),
                args=[ast.Attribute(value=ast.Name(id="self"), attr=name), *_],
            ):
                found.add(name)
    return found


def place_of(function: Callable[..., Any]) -> str:
    """A function's file and line."""
    return f"{Path(function.__code__.co_filename).name}, line {function.__code__.co_firstlineno}"


def _file(cls: type) -> str:
    try:
        return f"{Path(inspect.getfile(cls)).name}: "
    except (TypeError, OSError):
        return ""


def _written(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """A function's syntax tree, if its source can be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, SystemError):  # the last: Python 3.11's parser, at times, in threads
        return None
    return next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)


def _state(name: str, function: Callable[..., Any]) -> str:
    """The state parameter's name in a server's hook or a handler."""
    given = list(inspect.signature(function).parameters)
    hints = [str(kind) for kind in inspect.get_annotations(function).values()]
    handler = len(given) == 4 and any("Site" in hint for hint in hints)
    return given[1] if len(given) > 1 and (name in _STATEFUL or handler) else ""


def _assigns(function: ast.FunctionDef, name: str) -> bool:
    """Whether a function rebinds a local name."""
    left: list[ast.AST] = list(function.body)
    for node in left:
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
        if not isinstance(node, _SCOPES):
            left += ast.iter_child_nodes(node)
    return False


_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Syntax nodes with names of their own."""


def _returns(function: Callable[..., Any], written: ast.FunctionDef) -> bool:
    """Whether a function returns a value, is annotated not to, or raises."""
    if str(inspect.get_annotations(function).get("return", "")) == "None":
        return True
    return any(
        isinstance(node, ast.Raise) or (isinstance(node, ast.Return) and node.value) for node in ast.walk(written)
    )
