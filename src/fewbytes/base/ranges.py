"""Ranges of hyper-parameters, given in their types: `tau: Share = 0.5`, or `Annotated[float, msgspec.Meta(gt=0)]`."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fewbytes.base.errors import UserError

Share = Annotated[float, Meta(gt=0, le=1)]
UpToOne = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Whole = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Several = Annotated[int, Meta(ge=2)]
OF_TRAINING = "of training"
MOST_SAMPLES = 1 << 40  # limit for a client with an unknown number
Samples = Annotated[int, Meta(ge=1, le=MOST_SAMPLES), OF_TRAINING]
"""Marks a reply's field: the client's number of training samples. The engine refuses any but the known one."""
SENT, WHOLE, PART = "as sent", "the model's", "of the model"
"""Marks of a reply's wire values, as in `theta: Annotated[Dense, SENT]`. All values so marked have, together,
exactly the message's entries; the client's model's; or some of the model's, in the same types and shapes."""
MODEL = "the model itself"
"""Marks a message's wire value: entries of the client's model, which the client uses unchanged. A node can measure
their distance from the first model (`max-drift`), but not for messages with any other numbers."""
LEARNT, STATISTICS = "learnt", "statistics"
"""Used with SENT or WHOLE: only parameters among these entries; or only the others, such as batch normalisation's
statistics. LEARNT alone: parameters of any names."""
COUNTS = "counts of classes"
"""Marks a reply's wire value: one integer tensor with the client's number of training samples in each class. The engine
refuses negative numbers, and numbers other than the known ones, per class or in total."""
PRESENT = "classes held"
"""Marks a reply's list of integers: distinct classes, ascending. The engine checks that the client is known to have
training samples of each."""

EXACT = "exact"
"""Marks wire values of a message or reply that are never rounded."""
FRESH = "fresh"
"""Marks wire values that are new each round: what their rounding loses is not sent later."""

NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def check_ranges(settings: Any) -> None:
    """Raises UserError for a field of a dataclass whose value does not match its type.

    >>> from dataclasses import dataclass
    >>> from fewbytes.base.ranges import Share, check_ranges
    >>> @dataclass
    ... class Terms:
    ...     tau: Share = 0.5
    >>> check_ranges(Terms(tau=1))
    >>> check_ranges(Terms(tau=2))
    Traceback (most recent call last):
    fewbytes.base.errors.UserError: tau must be in (0, 1], not 2
    """
    hints = typing.get_type_hints(type(settings), include_extras=True)
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        if must := wrong(hints[f.name], value):
            raise UserError(f"{f.name} {must}, not {value!r}")


def wrong(kind: Any, value: Any) -> str:
    """The rule a value violates, such as `must be above 0`; empty if the value is valid for the hyper-parameter's type.

    Floats must be finite. Other types than bool, int, float, str, dataclasses, Literal, and Annotated and unions of
    them, are not checked.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        found = [wrong(arg, value) for arg in args]
        if "" in found:
            return ""
        first, *others = (each for each in found if each != "is none")
        return " or ".join([first, *(each.removeprefix("must be ") for each in others)])
    if origin is Literal:
        return "" if value in args else f"is one of {', '.join(map(str, args))}"
    if kind is type(None):
        return "" if value is None else "is none"
    plain, limits = (args[0], [arg for arg in args if isinstance(arg, Meta)]) if origin is Annotated else (kind, [])
    if isinstance(plain, type) and not isinstance(value, plain):
        if hasattr(plain, "read"):  # read from text, as in `fewbytes.base.settings`
            return "must be text"
        if dataclasses.is_dataclass(plain):
            return f"must be a {plain.__name__}"
    if plain in NAMES:
        accepted = (int, float) if plain is float else plain
        if not isinstance(value, accepted) or isinstance(value, bool) != (plain is bool):
            words = _range(limits)
            return f"must be {NAMES[plain]}{' of' if words.startswith('at') else ''} {words}".rstrip()
        if plain is float and not abs(value) <= sys.float_info.max:
            return "must be finite"
        value = plain(value)  # such as NumPy's float64
    if limits:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            return f"must be {_range(limits) or str(error).removeprefix('Expected ')}"
    return ""


def _range(limits: list[Meta]) -> str:
    """The range of a number, in words."""
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    ends = {name: end for meta in limits for name in words if (end := getattr(meta, name)) is not None}
    low, high = ends.get("gt", ends.get("ge")), ends.get("lt", ends.get("le"))
    if low is not None and high is not None:
        return f"in {'(' if 'gt' in ends else '['}{low:g}, {high:g}{')' if 'lt' in ends else ']'}"
    return " and ".join(f"{words[name]} {end:g}" for name, end in ends.items())


def described(kind: Any) -> str:
    """The allowed values of a hyper-parameter's type, in words: `number in (0, 1]`, `one of sgd, adam`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if arg is types.NoneType else described(arg) for arg in args)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    plain, limits = (args[0], [arg for arg in args if isinstance(arg, Meta)]) if origin is Annotated else (kind, [])
    name = NAMES.get(plain, getattr(plain, "__name__", str(plain))).removeprefix("a ")
    return f"{name} {_range(limits)}".rstrip()
