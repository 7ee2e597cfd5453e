"""A payload's schema: the types of its fields, compiled once into what writes, reads, finds and describes them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from msgspec import Meta
from torch import Tensor

from fewbytes.base.errors import FrameError, MethodError, with_article
from fewbytes.base.ranges import wrong
from fewbytes.wire import words
from fewbytes.wire.values import Reader, WireValue, Writer, entries_of, is_wire_value

Marks = frozenset[str]
"""How a field is marked, and all that it is part of (`fewbytes.base.ranges`)."""
UNMARKED: Marks = frozenset()
PLAIN = (bool, int, float, str, bytes)
TRAVELS = (
    "None, bool, int, float, str, bytes, Tensor, dict[str, Tensor], wire values such as Dense, dataclasses of these, "
    "and list[T], tuple[T, ...], dict[K, T] and T | None of them (K: bool, int, float, str, bytes or tuples of these)"
)
"""What types a payload's fields may have, in words."""


@dataclasses.dataclass(eq=False)
class Leaf:
    """A value in a payload that has no fields of its own: a wire value, a tensor, named tensors, or a plain value,
    which may be a list, tuple or dict of plain ones. `path`: where it stands, as in `blocks[0].theta`."""

    path: str
    kind: Kind
    marks: Marks
    value: Any

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Its tensors by name; that of a bare tensor is empty."""
        if isinstance(self.value, Tensor):
            return {"": self.value}
        return self.value if isinstance(self.kind, _Named) else entries_of(self.value)

    @property
    def floats(self) -> Iterator[float]:
        """The numbers of a plain value that are no integers."""
        return _floats(self.value) if self.kind.plain else iter(())

    def name(self, entry: str) -> str:
        """What one of its tensors is called."""
        return f"{self.path}[{entry}]" if entry else self.path


def _floats(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _floats(item)


class Kind:
    """A type whose values travel. `parts`: the types it is made of. `hint`: the type as written, if it says a range."""

    plain = True
    """Whether no tensor, wire value or dataclass is in its values."""

    def __init__(self, of: Any, *parts: Kind) -> None:
        self.of, self.parts = of, parts
        self.hint: Any = None

    def limited(self, hint: Any) -> Kind:
        """The same, whose values are in the ranges that a hint says."""
        self.hint = hint
        return self

    @cached_property
    def ranged(self) -> bool:
        """Whether its plain values, or what is in them, have ranges."""
        return self.plain and (self.hint is not None or any(part.ranged for part in self.parts))

    def check(self, value: Any) -> str:
        """What a plain value must be by its range, in words, if it is not; else nothing."""
        return "" if self.hint is None else wrong(self.hint, value)

    def write(self, value: Any, writer: Writer, path: str, marks: Marks) -> Any:
        """What stands in the header for a value; its arrays become sections. Raises TypeError for another type's."""
        remedy = f": give {self.of.__name__}(…)" if isinstance(self, _Wire) else ""
        own = with_article(said(self.of))
        raise TypeError(f"{path}: {with_article(type(value))} cannot travel as {own}{remedy}")

    def read(self, item: Any, reader: Reader) -> Any:
        """Undo `write`. Raises FrameError for what it would not have written."""
        raise FrameError("type", f"a field that must be {getattr(self.of, '__name__', self.of)} is not")

    def leaves(self, value: Any, path: str, marks: Marks) -> Iterator[Leaf]:
        """The leaves of a value, in order."""
        yield Leaf(path, self, marks, value)

    def types(self, marks: Marks = UNMARKED, within: tuple[Kind, ...] = ()) -> Iterator[tuple[Any, Marks]]:
        """The types of all leaves there can be, and how they are marked."""
        yield self.of, marks

    def describe(self, item: Any, path: str) -> Iterator[tuple[str, str]]:
        """What `write` put in the header, in words for people: where it stands, and lines on it."""
        text = repr(item)
        yield path, text if len(text) < 200 else text[:200] + "…"


class _Scalar(Kind):
    """None, bool, int, float or str."""

    def write(self, value: Any, writer: Writer, path: str, marks: Marks) -> Any:
        if type(value) is self.of:
            return value
        if self.of is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        return super().write(value, writer, path, marks)

    def read(self, item: Any, reader: Reader) -> Any:
        return item if type(item) is self.of else super().read(item, reader)


class _Raw(Kind):
    """Bytes: a section."""

    def write(self, value: Any, writer: Writer, path: str, marks: Marks) -> Any:
        if not isinstance(value, bytes):
            return super().write(value, writer, path, marks)
        writer.section([value])
        return len(value)

    def read(self, item: Any, reader: Reader) -> Any:
        if type(item) is not int:
            return super().read(item, reader)
        section = reader.section()
        if section.nbytes != item:
            raise FrameError("length", "a field of bytes has another length than it says")
        reader.spend(item)
        return bytes(section)

    def describe(self, item: Any, path: str) -> Iterator[tuple[str, str]]:
        yield path, f"{item:,} bytes"


class _Named(Kind):
    """Named tensors."""

    plain = False

    def write(self, value: Any, writer: Writer, path: str, marks: Marks) -> Any:
        if not isinstance(value, Mapping):
            raise TypeError(f"{path}: {with_article(type(value))} cannot travel as a dict of tensors")
        try:
            return writer.state(value)
        except TypeError as error:
            raise TypeError(f"{path}: {error}") from None

    def read(self, item: Any, reader: Reader) -> Any:
        return reader.state(item)

    def describe(self, item: Any, path: str) -> Iterator[tuple[str, str]]:
        yield from ((path, line) for line in words.named(item))


class _One(_Named):
    """A tensor: named tensors, of which there is one without a name."""

    def write(self, value: Any, writer: Writer, path: str, marks: Marks) -> Any:
        return writer.state({"": value}) if isinstance(value, Tensor) else Kind.write(self, value, writer, path, marks)

    def read(self, item: Any, reader: Reader) -> Any:
        state = reader.state(item)
        if list(state) != [""]:
            raise FrameError("type", "a tensor field is malformed")
        return state[""]


class _Wire(Kind):
    """A wire value, which knows how it travels."""

    plain = False

    def write(self, value: Any, writer: Writer, path: str, marks: Marks) -> Any:
        if not isinstance(value, self.of):
            return super().write(value, writer, path, marks)
        writer.path, writer.marks = path, marks
        return value.write(writer)

    def read(self, item: Any, reader: Reader) -> Any:
        return self.of.read(item, reader)

    def describe(self, item: Any, path: str) -> Iterator[tuple[str, str]]:
        yield from ((path, line) for line in self.of.describe(item))


class _Several(Kind):
    """A type made of others. Its values are one leaf if they are plain."""

    def __init__(self, of: Any, *parts: Kind) -> None:
        super().__init__(of, *parts)
        self.plain = all(part.plain for part in parts)

    def inner(self, value: Any, path: str) -> Iterator[tuple[Kind, Any, str]]:
        """What a value is made of, or what stands for it in the header: types, values, and where they stand."""
        raise NotImplementedError

    def check(self, value: Any) -> str:
        found = super().check(value)
        return found or next((must for kind, each, _ in self.inner(value, "") if (must := kind.check(each))), "")

    def write(self, value: Any, writer: Writer, path: str, marks: Marks) -> Any:
        return [kind.write(each, writer, where, marks) for kind, each, where in self.inner(value, path)]

    def leaves(self, value: Any, path: str, marks: Marks) -> Iterator[Leaf]:
        if self.plain:
            yield Leaf(path, self, marks, value)
        else:
            for kind, each, where in self.inner(value, path):
                yield from kind.leaves(each, where, marks)

    def types(self, marks: Marks = UNMARKED, within: tuple[Kind, ...] = ()) -> Iterator[tuple[Any, Marks]]:
        for part in self.parts:
            yield from part.types(marks, within)

    def describe(self, item: Any, path: str) -> Iterator[tuple[str, str]]:
        if self.plain:
            yield from super().describe(item, path)
        else:
            for kind, each, where in self.inner(item, path):
                yield from kind.describe(each, where)


class _Optional(_Several):
    """A value or None: an array of one, or null."""

    def inner(self, value: Any, path: str) -> Iterator[tuple[Kind, Any, str]]:
        if value is not None:
            yield self.parts[0], value, path

    def write(self, value: Any, writer: Writer, path: str, marks: Marks) -> Any:
        return None if value is None else super().write(value, writer, path, marks)

    def read(self, item: Any, reader: Reader) -> Any:
        if item is None:
            return None
        if not isinstance(item, list) or len(item) != 1:
            raise FrameError("type", "an optional field is malformed")
        return self.parts[0].read(item[0], reader)

    def leaves(self, value: Any, path: str, marks: Marks) -> Iterator[Leaf]:
        return Kind.leaves(self, None, path, marks) if value is None else super().leaves(value, path, marks)

    def describe(self, item: Any, path: str) -> Iterator[tuple[str, str]]:
        return Kind.describe(self, None, path) if item is None else self.parts[0].describe(item[0], path)


class _ListOf(_Several):
    """A list: an array."""

    def inner(self, value: Any, path: str) -> Iterator[tuple[Kind, Any, str]]:
        return ((self.parts[0], each, f"{path}[{i}]") for i, each in enumerate(value))

    def read(self, item: Any, reader: Reader) -> Any:
        read = self.parts[0].read
        return [read(each, reader) for each in _array(item, "list")]


class _TupleOf(_Several):
    """A tuple of so many values, each of its type: an array."""

    def inner(self, value: Any, path: str) -> Iterator[tuple[Kind, Any, str]]:
        pairs = zip(self.parts, value, strict=True)
        return ((kind, each, f"{path}[{i}]") for i, (kind, each) in enumerate(pairs))

    def read(self, item: Any, reader: Reader) -> Any:
        if len(_array(item, "tuple")) != len(self.parts):
            raise FrameError("type", "a tuple has another length than its type")
        return tuple(kind.read(each, reader) for kind, each in zip(self.parts, item, strict=True))


class _RowOf(_ListOf):
    """A tuple of any number of values of a type: an array."""

    def read(self, item: Any, reader: Reader) -> Any:
        return tuple(self.parts[0].read(each, reader) for each in _array(item, "tuple"))


class _DictOf(_Several):
    """A dict: an array of pairs. `parts`: of its keys, and of its values."""

    def inner(self, value: Any, path: str) -> Iterator[tuple[Kind, Any, str]]:
        pairs = value.items() if isinstance(value, Mapping) else value
        return ((self.parts[1], each, f"{path}[{key!r}]") for key, each in pairs)

    def check(self, value: Any) -> str:
        return next((must for key in value if (must := self.parts[0].check(key))), "") or super().check(value)

    def write(self, value: Any, writer: Writer, path: str, marks: Marks) -> Any:
        pairs = zip(value, self.inner(value, path), strict=True)
        key = self.parts[0]
        return [[key.write(k, writer, path, marks), kind.write(v, writer, at, marks)] for k, (kind, v, at) in pairs]

    def read(self, item: Any, reader: Reader) -> Any:
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in _array(item, "dict")):
            raise FrameError("type", "a dict is malformed")
        key, value = self.parts
        pairs = [(key.read(k, reader), value.read(v, reader)) for k, v in item]
        if len(dict(pairs)) != len(pairs):
            raise FrameError("type", "a key stands twice in a dict")
        return dict(pairs)


class Field(NamedTuple):
    """A field of a dataclass."""

    name: str
    kind: Kind
    marks: Marks


class Record(Kind):
    """A dataclass: an array of its fields, in order."""

    plain = False
    fields: tuple[Field, ...] = ()

    def write(self, value: Any, writer: Writer, path: str, marks: Marks) -> Any:
        """The array of a dataclass. Raises TypeError for another."""
        if not isinstance(value, self.of):
            return super().write(value, writer, path, marks)
        return [
            kind.write(getattr(value, name), writer, f"{path}.{name}", marks | own) for name, kind, own in self.fields
        ]

    def read(self, item: Any, reader: Reader) -> Any:
        """Undo `write`. Raises FrameError."""
        if not isinstance(item, list) or len(item) != len(self.fields):
            raise FrameError("type", f"a {self.of.__name__} has another number of fields than this receiver's")
        pairs = zip(self.fields, item, strict=True)
        return self.of(**{field.name: field.kind.read(each, reader) for field, each in pairs})

    def leaves(self, value: Any, path: str, marks: Marks) -> Iterator[Leaf]:
        """The leaves of all fields."""
        for name, kind, own in self.fields:
            yield from kind.leaves(getattr(value, name), f"{path}.{name}" if path else name, marks | own)

    def types(self, marks: Marks = UNMARKED, within: tuple[Kind, ...] = ()) -> Iterator[tuple[Any, Marks]]:
        """The types of all fields' leaves."""
        for field in self.fields if self not in within else ():
            yield from field.kind.types(marks | field.marks, (*within, self))

    def describe(self, item: Any, path: str) -> Iterator[tuple[str, str]]:
        """What `write` made, by field."""
        for field, each in zip(self.fields, item, strict=True):
            yield from field.kind.describe(each, f"{path}.{field.name}" if path else field.name)


_COMPILED: dict[Any, Record] = {}


def _array(item: Any, what: str) -> list[Any]:
    if not isinstance(item, list):
        raise FrameError("type", f"a field that must be a {what} is not")
    return item


def schema_of(cls: Any) -> Record:
    """The schema of a dataclass. Raises MethodError if values of it cannot travel: it is no dataclass, or a field is of
    a wrong type; NameError or AttributeError if its type hints name what is not there (yet)."""
    if cls not in _COMPILED:
        _COMPILED[cls] = _record(cls, {})
    return _COMPILED[cls]


def leaves_of(value: Any) -> list[Leaf]:
    """The leaves of a payload, or the wire value itself as one; none of None."""
    if value is None:
        return []
    kind: Kind = _Wire(type(value)) if is_wire_value(value) else schema_of(type(value))
    return list(kind.leaves(value, "", UNMARKED))


def check_fields(cls: type) -> None:
    """Raises MethodError if values of a class cannot travel, as `schema_of`, or its type hints cannot be resolved."""
    try:
        schema_of(cls)
    except (NameError, AttributeError) as error:
        raise MethodError(f"the type hints of {said(cls)} cannot be resolved: {error}") from None


def _record(cls: Any, known: dict[Any, Record]) -> Record:
    """The schema of a class; `known`: of those it stands in, as it may hold itself."""
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise MethodError(f"{said(cls)} cannot travel as a message, reply or state: only dataclasses do")
    record = known[cls] = Record(cls)
    hints, fields = typing.get_type_hints(cls, include_extras=True), []
    for name in (f.name for f in dataclasses.fields(cls)):
        if (kind := _kind(hints[name], known)) is None:
            bare = typing.get_type_hints(cls)[name]
            raise MethodError(f"{cls.__name__}.{name}: {said(bare)} cannot travel; what can: {TRAVELS}")
        metadata = getattr(hints[name], "__metadata__", ())
        fields.append(Field(name, kind, frozenset(mark for mark in metadata if isinstance(mark, str))))
    record.fields = tuple(fields)
    return record


def _kind(hint: Any, known: dict[Any, Record]) -> Kind | None:
    """What a type hint stands for; None for what cannot travel. Raises as `schema_of` for fields of dataclasses."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        kind = _kind(args[0], known)
        ranges = any(isinstance(each, Meta) for each in args[1:])
        return kind.limited(hint) if kind is not None and kind.plain and ranges else kind
    if origin is dict and args == (str, Tensor):
        return _Named(hint)
    if hint is Tensor:
        return _One(hint)
    if hint is bytes:
        return _Raw(hint)
    if hint in (type(None), *PLAIN):
        return _Scalar(hint)
    if isinstance(hint, type) and not args and issubclass(hint, WireValue):
        return _Wire(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return known.get(hint) or _record(hint, known)
    if origin is dict and len(args) == 2 and not _is_key(args[0]):
        return None
    optional = origin in (typing.Union, types.UnionType) and len(args) == 2 and type(None) in args
    if not (optional or origin in (list, tuple, dict)):
        return None
    kinds = [_kind(arg, known) for arg in args if arg is not (type(None) if optional else ...)]
    parts = [kind for kind in kinds if kind is not None]
    if len(parts) != len(kinds):
        return None
    if optional:
        return _Optional(hint, *parts)
    if origin is tuple:
        return _RowOf(hint, *parts) if args[1:] == (...,) else _TupleOf(hint, *parts)
    return _ListOf(hint, *parts) if origin is list else _DictOf(hint, *parts)


def _is_key(hint: Any) -> bool:
    """Whether values of a type may be keys of a dict that travels."""
    if typing.get_origin(hint) is tuple:
        return all(_is_key(arg) for arg in typing.get_args(hint) if arg is not ...)
    return hint in PLAIN


def said(kind: Any) -> str:
    """A type as people write it."""
    return kind.__qualname__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
