"""What in a method's class is most likely a slip of its author, who would otherwise not hear of it."""

from __future__ import annotations

import difflib
import dis
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from fewbytes.base.errors import Slip

CLOSE = 0.8  # of difflib: `global_modell` and `clients` are as near to what they should be
_heard: set[type] = set()  # classes that were looked at


def warn_of_slips(cls: type, base: type) -> None:
    """Warn, once, of what looks like a slip in a class derived from `base`."""
    if cls not in _heard:
        _heard.add(cls)
        for text in slips(cls, base):
            warnings.warn(text, Slip, stacklevel=4)


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
        within = f"{cls.__name__}.{name}"
        is_code = inspect.isroutine(value) or isinstance(value, property | type)
        free = known - vars(cls).keys()
        close = difflib.get_close_matches(name, free, n=1, cutoff=CLOSE) if is_code or name not in typed else []
        if close:
            yield f"{within} means nothing to a run: did you mean {close[0]}?"
        elif name not in typed and not is_code and not name.isupper():
            yield f"{within} has no type, so it is no hyper-parameter: write {name}: {type(value).__name__} = …"
    for name, value in vars(cls).items():
        if inspect.isfunction(value) and name in {*_STATEFUL, *_handlers(cls)} and _rebinds(value):
            state = value.__code__.co_varnames[1]
            yield (
                f"{cls.__name__}.{name} gives `{state}` another value, which is gone when it returns: change what it "
                f"holds, {state}.… = …"
            )


_STATEFUL = ("start", "round", "finish", "join")


def _handlers(cls: type) -> set[str]:
    return {
        name
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and "site" in value.__code__.co_varnames[: value.__code__.co_argcount]
    }


def _rebinds(function: Callable[..., Any]) -> bool:
    """Whether a function assigns to its second parameter, after `self`."""
    code = function.__code__
    if code.co_argcount < 2:
        return False
    name = code.co_varnames[1]
    for each in dis.get_instructions(code):
        if each.opname.startswith("STORE_FAST"):
            stored = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            if name in stored:
                return True
    return False
