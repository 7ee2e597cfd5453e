"""A payload's schema: its class's fields and their types, compiled once; and the leaves of a payload."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, dataclass_transform

from msgspec import Meta
from torch import Tensor

from fewbytes.base.errors import MethodError
from fewbytes.base.ranges import wrong
from fewbytes.wire.value import WireValue, entries_of, is_wire_value

T = TypeVar("T")
Marks = frozenset[str]
"""The marks of a field, and of all fields that contain it (`fewbytes.base.ranges`)."""
UNMARKED: Marks = frozenset()
PLAIN = (bool, int, float, str, bytes)
TRAVELS = (
    "None, bool, int, float, str, bytes, Tensor, dict[str, Tensor], wire values such as Dense, dataclasses of these, "
    "and list[T], tuple[T, ...], dict[K, T] and T | None of them (K: bool, int, float, str, bytes or tuples of these)"
)
"""The types a payload's fields may have, in words."""


@dataclass(eq=False)
class Kind:
    """A type whose values travel: `of`, as written; a `row` is a tuple of any length. `parts`: the types it consists of
    (a dict's: keys and values); `fields`: those of a dataclass. `limits`: the type with its ranges (None: none)."""

    form: Literal["plain", "bytes", "tensor", "state", "wire", "optional", "list", "row", "tuple", "dict", "dataclass"]
    of: Any
    parts: tuple[Kind, ...] = ()
    fields: tuple[Field, ...] = ()
    limits: Any = None

    @cached_property
    def plain(self) -> bool:
        """Whether its values cannot contain a tensor, wire value or dataclass."""
        made = self.form in ("optional", "list", "row", "tuple", "dict") and all(part.plain for part in self.parts)
        return made or self.form in ("plain", "bytes")

    @cached_property
    def ranged(self) -> bool:
        """Whether its plain values, or their contents, have ranges."""
        return self.plain and (self.limits is not None or any(part.ranged for part in self.parts))

    @cached_property
    def required(self) -> int:
        """How many of a dataclass's fields, the first, have no default."""
        of = dataclasses.fields(self.of)
        return sum(f.default is f.default_factory is dataclasses.MISSING for f in of)

    def wrong(self, value: Any) -> str:
        """The range that a plain value violates, in words; empty if it is valid."""
        must = "" if self.limits is None else wrong(self.limits, value)
        return must or next((must for kind, each, *_ in self.inner(value) if (must := kind.wrong(each))), "")

    def inner(self, value: Any, path: str = "", marks: Marks = UNMARKED) -> Iterator[tuple[Kind, Any, str, Marks]]:
        """The contents of a value: their types, values, paths and marks."""
        match self.form:
            case "optional" if value is not None:
                yield self.parts[0], value, path, marks
            case "list" | "row":
                for i, each in enumerate(value):
                    yield self.parts[0], each, f"{path}[{i}]", marks
            case "tuple":
                for i, (kind, each) in enumerate(zip(self.parts, value, strict=True)):
                    yield kind, each, f"{path}[{i}]", marks
            case "dict":
                for key, each in value.items():
                    yield self.parts[0], key, path, marks
                    yield self.parts[1], each, f"{path}[{key!r}]", marks
            case "dataclass":
                for name, kind, own in self.fields:
                    yield kind, getattr(value, name), f"{path}.{name}" if path else name, marks | own

    def leaves(self, value: Any, path: str = "", marks: Marks = UNMARKED) -> Iterator[Leaf]:
        """The leaves of a value, in order."""
        if self.plain or value is None or not (self.parts or self.fields):
            yield Leaf(path, self, marks, value)
        else:
            for kind, each, where, own in self.inner(value, path, marks):
                yield from kind.leaves(each, where, own)

    def types(self, marks: Marks = UNMARKED, within: tuple[Kind, ...] = ()) -> Iterator[tuple[Any, Marks]]:
        """The types of all possible leaves, and their marks; `within`: the types that contain these."""
        if not (self.parts or self.fields):
            yield self.of, marks
        for part in self.parts:
            yield from part.types(marks, within)
        for field in self.fields if self not in within else ():
            yield from field.kind.types(marks | field.marks, (*within, self))


class Field(NamedTuple):
    """A field of a dataclass."""

    name: str
    kind: Kind
    marks: Marks


@dataclass(eq=False)
class Leaf:
    """A value in a payload without fields of its own: a wire value, a tensor, named tensors, or a plain value, also a
    list, tuple or dict of plain ones. `path`: its position, as in `blocks[0].theta`."""

    path: str
    kind: Kind
    marks: Marks
    value: Any

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Its tensors by name; the name of a bare tensor is empty."""
        if isinstance(self.value, Tensor):
            return {"": self.value}
        return self.value if self.kind.form == "state" else entries_of(self.value)

    @property
    def floats(self) -> Iterator[float]:
        """The floats in a plain value."""
        return _floats(self.value) if self.kind.plain else iter(())

    def name(self, entry: str) -> str:
        """The name of one of its tensors."""
        return f"{self.path}[{entry}]" if entry else self.path


def _floats(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _floats(item)


def leaves_of(value: Any) -> list[Leaf]:
    """The leaves of a payload, or a wire value itself as the only one; empty for None."""
    if value is None:
        return []
    return list((Kind("wire", type(value)) if is_wire_value(value) else schema_of(type(value))).leaves(value))


_COMPILED: dict[Any, Kind] = {}


def schema_of(cls: Any) -> Kind:
    """The schema of a dataclass. Raises MethodError if its values cannot travel: it is not a dataclass, or a field has
    a wrong type; NameError or AttributeError if its type hints have names that are not defined (yet)."""
    if cls not in _COMPILED:
        _COMPILED[cls] = _compiled(cls, {})
    return _COMPILED[cls]


@dataclass_transform(frozen_default=True, eq_default=False)
def payload(cls: type[T]) -> type[T]:
    """Make a class a payload: a frozen dataclass whose fields travel.

    Fields may be None, bool, int (64 bit), float, str, bytes, tensors, states (named tensors), wire values, other
    dataclasses, and lists, tuples, dicts and `| None` of these. Raises MethodError for a field of another type.

    >>> import fewbytes as fb
    >>> import torch
    >>> @fb.payload
    ... class Update:
    ...     theta: fb.Dense
    ...     samples: int
    >>> update = Update(fb.Dense({"w": torch.ones(2)}), samples=40)
    >>> fb.unpack(Update, bytes(fb.pack(update))).samples
    40
    """
    made = dataclasses.dataclass(frozen=True, eq=False)(cls)
    with suppress(NameError, AttributeError):  # a type that is defined later: checked when it is first sent
        schema_of(made)
    return made


def check_fields(cls: type) -> None:
    """Raises MethodError if values of a class cannot travel, as `schema_of`, or its type hints cannot be resolved."""
    try:
        schema_of(cls)
    except (NameError, AttributeError) as error:
        raise MethodError(f"the type hints of {type_text(cls)} cannot be resolved: {error}") from None


def _compiled(cls: Any, known: dict[Any, Kind]) -> Kind:
    """The schema of a class; `known`: those of the classes that contain it, for recursive types."""
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise MethodError(f"{type_text(cls)} cannot travel as a message, reply or state: only dataclasses do")
    found = known[cls] = Kind("dataclass", cls)
    hints, fields = typing.get_type_hints(cls, include_extras=True), []
    for name in (f.name for f in dataclasses.fields(cls)):
        if (kind := _kind(hints[name], known)) is None:
            bare = typing.get_type_hints(cls)[name]
            raise MethodError(f"{cls.__name__}.{name}: {type_text(bare)} cannot travel; supported: {TRAVELS}")
        marks = frozenset(mark for mark in getattr(hints[name], "__metadata__", ()) if isinstance(mark, str))
        fields.append(Field(name, kind, marks))
    found.fields = tuple(fields)
    return found


def _kind(hint: Any, known: dict[Any, Kind]) -> Kind | None:
    """The kind of a type hint; None if it cannot travel. Raises as `schema_of` for fields of dataclasses."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        kind = _kind(args[0], known)
        if kind is not None and kind.plain and any(isinstance(each, Meta) for each in args[1:]):
            kind.limits = hint
        return kind
    if origin is dict and args == (str, Tensor):
        return Kind("state", hint)
    if hint in (Tensor, bytes):
        return Kind("tensor" if hint is Tensor else "bytes", hint)
    if hint in (type(None), *PLAIN):
        return Kind("plain", hint)
    if isinstance(hint, type) and not args and issubclass(hint, WireValue):
        return Kind("wire", hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return known.get(hint) or _compiled(hint, known)
    optional = origin in (typing.Union, types.UnionType) and len(args) == 2 and type(None) in args
    if not (optional or origin in (list, tuple, dict)) or (origin is dict and not _is_key(args[0])):
        return None
    parts = [_kind(arg, known) for arg in args if arg is not (type(None) if optional else ...)]
    made = tuple(part for part in parts if part is not None)
    form: Any = "optional" if optional else "row" if origin is tuple and ... in args else origin.__name__
    return Kind(form, hint, made) if len(made) == len(parts) else None


def _is_key(hint: Any) -> bool:
    """Whether values of a type may be keys of a dict that travels."""
    if typing.get_origin(hint) is tuple:
        return all(_is_key(arg) for arg in typing.get_args(hint) if arg is not ...)
    return hint in PLAIN


def type_text(kind: Any) -> str:
    """A type as written in source code."""
    return kind.__qualname__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
