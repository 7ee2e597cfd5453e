"""What hyper-parameters may be, said in their types: `tau: Share = 0.5`, or `Annotated[float, msgspec.Meta(gt=0)]`."""

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
MOST_SAMPLES = 1 << 40  # of a client of which nothing is known
Samples = Annotated[int, Meta(ge=1, le=MOST_SAMPLES), OF_TRAINING]
"""Of a reply: how many samples the client has to train on. The engine refuses another number than it knows of."""
SENT, WHOLE, PART = "as sent", "the model's", "of the model"
"""Of a reply's wire values, as in `theta: Annotated[Dense, SENT]`: they hold, all so marked together, every entry of
the message; every entry of the client's model; or some of these; each in its type and shape, and no other."""
MODEL = "the model itself"
"""Of a message's wire value: entries of the client's model, from which it goes on as they are. A node can tell how far
they are from the first ones (`max-drift`); of a message with any other numbers it cannot."""
LEARNT, STATISTICS = "learnt", "statistics"
"""Beside SENT or WHOLE: of these entries those that are parameters; or those that are not, such as batch
normalisation's statistics. LEARNT alone: parameters, of whatever names."""
COUNTS = "counts of classes"
"""Of a reply's wire value: one integer tensor that says how many training samples the client has of each class. None is
below zero, and the engine refuses other numbers than it knows of, of each class or of all together."""
PRESENT = "classes held"
"""Of a reply's list of integers: classes, ascending, each once, of which the client has training samples as far as the
engine knows."""

EXACT = "exact"
"""Of wire values of a message or reply: a run that rounds what travels leaves these as they are."""
FRESH = "fresh"
"""Of the same: they do not go on from round to round, so what rounding them loses is not sent later."""

NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def check_ranges(settings: Any) -> None:
    """Raises UserError for a field of a dataclass that is not what its type says.

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
    """What a hyper-parameter of a type is, as in `must be above 0`, if this value is not; else nothing.

    A number of type float is finite. Types other than bool, int, float, str, dataclasses, Literal, and Annotated and
    unions of them, are not looked at.
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
        if hasattr(plain, "read"):  # of text, as in `fewbytes.base.settings`
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
    """The range of a number, as people write it."""
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    ends = {name: end for meta in limits for name in words if (end := getattr(meta, name)) is not None}
    low, high = ends.get("gt", ends.get("ge")), ends.get("lt", ends.get("le"))
    if low is not None and high is not None:
        return f"in {'(' if 'gt' in ends else '['}{low:g}, {high:g}{')' if 'lt' in ends else ']'}"
    return " and ".join(f"{words[name]} {end:g}" for name, end in ends.items())


def described(kind: Any) -> str:
    """What a hyper-parameter of a type may be, in words: `number in (0, 1]`, `one of sgd, adam`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if arg is types.NoneType else described(arg) for arg in args)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    plain, limits = (args[0], [arg for arg in args if isinstance(arg, Meta)]) if origin is Annotated else (kind, [])
    name = NAMES.get(plain, getattr(plain, "__name__", str(plain))).removeprefix("a ")
    return f"{name} {_range(limits)}".rstrip()
