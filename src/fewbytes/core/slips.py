"""What in a method's class is most likely a slip of its author, who would otherwise not hear of it."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import dis
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fewbytes.base.errors import MethodError, Slip
from fewbytes.core.network import hints_of
from fewbytes.core.promises import Promises

PROMISED = frozenset(each.name for each in dataclasses.fields(Promises))
CLOSE = 0.8  # of difflib: `global_modell` and `clients` are as near to what they should be
_heard: set[type] = set()  # classes that were looked at


def warn_of_slips(cls: type, base: type) -> None:
    """Warn, once, of what looks like a slip in a class derived from `base`."""
    if cls not in _heard:
        _heard.add(cls)
        for text in slips(cls, base):
            warnings.warn(text, Slip, stacklevel=3)


def check_hooks(cls: type, base: type) -> None:
    """Raises MethodError for what a class has in place of a function or an attribute of `base` that a run cannot use,
    and for types of hyper-parameters that cannot be resolved."""
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
    """Whether what a class has in place of a function of so many arguments can be called with them; of a descriptor
    other than a function, that is not known."""
    if not inspect.isfunction(own):
        return callable(own) or hasattr(own, "__get__")
    try:
        inspect.signature(own).bind(*[None] * count)
    except TypeError:
        return False
    return True


def slips(cls: type, base: type) -> Iterator[str]:
    """A line for each: an attribute whose name is nearly one that `base` has and the class has not, one without a type,
    and a `state` that is given another value, which nobody sees."""
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
            yield f"{within} has no type, so it is no hyper-parameter: write {name}: {type(value).__name__} = …"
    for name, kind in typed.items():
        if name in known and "ClassVar" not in str(kind) and not hasattr(getattr(base, name), "__get__"):
            within = f"{_file(cls)}{cls.__name__}.{name}"
            yield f"{within} is no hyper-parameter but what it is, as a method: write {name}: ClassVar[…] = …"
    for name, value in vars(cls).items():
        if not inspect.isfunction(value):
            continue
        where = f"{place_of(value)}: {cls.__name__}.{name}"
        if (state := _state(name, value)) and _assigns(value, state):
            yield f"{where} gives `{state}` another value, gone when it returns: change what it holds, {state}.… = …"
        if name in _GIVES and not _returns(value):
            yield f"{where} returns nothing: is `return` missing?"


_KINDS = {Promises: "Promises(…)", type: "a class"}
_GIVES = ("server", "client", "global_model", "local_model", "server_models")
_ASKS = ("call", "tell", "stream")
_STATEFUL = ("start", "round", "finish", "join")


def called(cls: type) -> set[str]:
    """The names of the class's functions that its code has clients run: `net.call(self.train, …)`, `tell`, `stream`."""
    found = set()
    for _, function in inspect.getmembers(cls, inspect.isfunction):
        codes = [function.__code__]
        for code in codes:
            codes += filter(inspect.iscode, code.co_consts)  # of what is written within it
            steps = list(dis.get_instructions(code))
            for asks, owner, step in zip(steps, steps[1:], steps[2:], strict=False):
                handed = step.opname == "LOAD_ATTR" and step.argrepr == step.argval  # not called there
                if handed and owner.argval == "self" and asks.argval in _ASKS:
                    found.add(step.argval)
    return {name for name in found if inspect.isfunction(getattr(cls, name, None))}


def sited(cls: type, base: type) -> set[str]:
    """The names of the functions, which `base` has not, that take a state, a message and a site, by what they call the
    last."""
    own = inspect.getmembers(cls, lambda value: inspect.isfunction(value) and value.__code__.co_argcount == 4)
    return {name for name, value in own if not hasattr(base, name) and value.__code__.co_varnames[3] == "site"}


def place_of(function: Callable[..., Any]) -> str:
    """Where a function was written."""
    return f"{Path(function.__code__.co_filename).name}, line {function.__code__.co_firstlineno}"


def _file(cls: type) -> str:
    try:
        return f"{Path(inspect.getfile(cls)).name}: "
    except (TypeError, OSError):
        return ""


def _state(name: str, function: Callable[..., Any]) -> str:
    """What a server's hook or a handler calls the state it is given."""
    code = function.__code__
    given = code.co_varnames[: code.co_argcount]
    hints = [str(kind) for kind in inspect.get_annotations(function).values()]
    handler = len(given) == 4 and any("Site" in hint for hint in hints)
    return given[1] if len(given) > 1 and (name in _STATEFUL or handler) else ""


def _assigns(function: Callable[..., Any], name: str) -> bool:
    """Whether a function gives a name of its own another value; also one that a comprehension within it reads."""
    for each in dis.get_instructions(function.__code__):
        stored = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if each.opname.startswith(("STORE_FAST", "STORE_DEREF")) and name in stored:
            return True
    return False


def _returns(function: Callable[..., Any]) -> bool:
    """Whether a function returns something, or says that it does not, or raises; also if its source cannot be read."""
    if str(inspect.get_annotations(function).get("return", "")) == "None":
        return True
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return True
    return any(isinstance(node, ast.Raise) or (isinstance(node, ast.Return) and node.value) for node in ast.walk(tree))
