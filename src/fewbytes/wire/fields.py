"""Typed payloads to frames and back: what a dataclass of packable fields becomes on the wire, and on disk."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar, dataclass_transform

from torch import Tensor

from fewbytes.base.errors import FrameError, MethodError, UserError, with_article
from fewbytes.wire.frame import MOST_ITEMS, NO_HASH, Frame, Parsed
from fewbytes.wire.layout import Layout
from fewbytes.wire.lossy import Lossy
from fewbytes.wire.values import Base, Reader, WireValue, Writer, is_wire_value

T = TypeVar("T")
LIMIT = 1 << 30  # bytes of arrays a receiver is ready to hold for one payload, unless it says otherwise
ANY = 1 << 62  # more than there can be
PER_ITEM = 1 << 14  # bytes of that limit for each item of a header, though MOST_ITEMS may always stand there


@dataclass_transform(frozen_default=True, eq_default=False)
def payload(cls: type[T]) -> type[T]:
    """Make a class a payload: a frozen dataclass whose fields travel.

    Fields may be None, bool, int (64 bit), float, str, bytes, tensors, states (named tensors), wire values, other
    dataclasses, and lists, tuples, dicts and `| None` of these. Raises MethodError for a field of another type.
    """
    made = dataclasses.dataclass(frozen=True, eq=False)(cls)
    with suppress(NameError, AttributeError):  # a type of a later line or of itself: checked when it is first sent
        _check(made, ())
    return made


@cache
def _hints(cls: type) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((f.name, hints[f.name]) for f in dataclasses.fields(cls))


@cache
def _is_state(kind: Any) -> bool:
    return typing.get_origin(kind) is dict and typing.get_args(kind) == (str, Tensor)


@cache
def _optional(kind: Any) -> Any:
    """The type T of `T | None`, or None if the type is not such a union."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        args = [a for a in typing.get_args(kind) if a is not type(None)]
        if len(args) == 1 and len(typing.get_args(kind)) == 2:
            return args[0]
    return None


PLAIN = (bool, int, float, str, bytes)
TRAVELS = (
    "None, bool, int, float, str, bytes, Tensor, dict[str, Tensor], wire values such as Dense, dataclasses of these, "
    "and list[T], tuple[T, ...], dict[K, T] and T | None of them (K: bool, int, float, str, bytes or tuples of these)"
)
"""What types a payload's fields may have, in words."""


def check_fields(cls: type) -> None:
    """Raises MethodError if values of a class cannot travel: it is no dataclass, or a field is of a wrong type."""
    try:
        _check(cls, ())
    except (NameError, AttributeError) as error:
        raise MethodError(f"the type hints of {_words(cls)} cannot be resolved: {error}") from None


def _check(cls: type, within: tuple[type, ...]) -> None:
    """`check_fields` for a class met `within` others; raises NameError or AttributeError for an undefined type."""
    if not dataclasses.is_dataclass(cls):
        raise MethodError(f"{_words(cls)} cannot travel as a message, reply or state: only dataclasses do")
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if not _travels(hints[f.name], (*within, cls)):
            raise MethodError(f"{cls.__name__}.{f.name}: {_words(hints[f.name])} cannot travel; what can: {TRAVELS}")


def _travels(kind: Any, within: tuple[type, ...]) -> bool:
    """Whether values of a type can be packed and read again; raises as `_check` for fields of dataclasses."""
    kind = _optional(kind) or kind
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict and len(args) == 2:
        return _is_state(kind) or (_is_key(args[0]) and _travels(args[1], within))
    if origin in (list, tuple):
        return all(_travels(arg, within) for arg in args if arg is not ...)
    if kind in (type(None), Tensor, *PLAIN) or kind in within:
        return True
    if isinstance(kind, type) and not issubclass(kind, WireValue) and dataclasses.is_dataclass(kind):
        _check(kind, within)
        return True
    return isinstance(kind, type) and issubclass(kind, WireValue)


def _is_key(kind: Any) -> bool:
    """Whether values of a type may be keys of a dict that travels."""
    if typing.get_origin(kind) is tuple:
        return all(_is_key(arg) for arg in typing.get_args(kind) if arg is not ...)
    return kind in PLAIN


def _words(kind: Any) -> str:
    """A type as people write it."""
    return kind.__qualname__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


def _write(kind: Any, value: Any, writer: Writer, path: str) -> Any:
    inner = _optional(kind)
    if inner is not None:
        return None if value is None else [_write(inner, value, writer, path)]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if _is_state(kind):
        if not isinstance(value, Mapping):
            raise TypeError(f"{path}: {with_article(type(value))} cannot travel as a dict of tensors")
        try:
            return writer.state(value)
        except TypeError as error:
            raise TypeError(f"{path}: {error}") from None
    if origin is list:
        return [_write(args[0], v, writer, f"{path}[{i}]") for i, v in enumerate(value)]
    if origin is tuple:
        kinds = [args[0]] * len(value) if len(args) == 2 and args[1] is ... else list(args)
        return [_write(k, v, writer, f"{path}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True))]
    if origin is dict:
        return [
            [_write(args[0], k, writer, path), _write(args[1], v, writer, f"{path}[{k!r}]")] for k, v in value.items()
        ]
    if kind is type(None) and value is None:
        return None
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (bool, int, str) and type(value) is kind:
        return value
    if kind is bytes and isinstance(value, bytes):
        writer.section([value])
        return len(value)
    if kind is Tensor and isinstance(value, Tensor):
        return writer.state({"": value})
    if isinstance(kind, type) and isinstance(value, kind):
        if is_wire_value(value):
            writer.path = path
            return value.write(writer)
        if dataclasses.is_dataclass(kind):
            return [_write(k, getattr(value, name), writer, f"{path}.{name}") for name, k in _hints(kind)]
    wire = isinstance(kind, type) and issubclass(kind, WireValue)
    remedy = f": give {kind.__name__}(…)" if wire else ""
    raise TypeError(f"{path}: {with_article(type(value))} cannot travel as {with_article(_words(kind))}{remedy}")


def _read(kind: Any, item: Any, reader: Reader) -> Any:
    inner = _optional(kind)
    if inner is not None:
        if item is None:
            return None
        if not isinstance(item, list) or len(item) != 1:
            raise FrameError("type", "an optional field is malformed")
        return _read(inner, item[0], reader)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if _is_state(kind):
        return reader.state(item)
    if origin in (list, tuple, dict):
        if not isinstance(item, list):
            raise FrameError("type", f"a field that must be a {origin.__name__} is not")
        if origin is list:
            return [_read(args[0], v, reader) for v in item]
        if origin is tuple:
            kinds = [args[0]] * len(item) if len(args) == 2 and args[1] is ... else list(args)
            if len(kinds) != len(item):
                raise FrameError("type", "a tuple has another length than its type")
            return tuple(_read(k, v, reader) for k, v in zip(kinds, item, strict=True))
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in item):
            raise FrameError("type", "a dict is malformed")
        pairs = [(_read(args[0], k, reader), _read(args[1], v, reader)) for k, v in item]
        if len(dict(pairs)) != len(pairs):
            raise FrameError("type", "a key stands twice in a dict")
        return dict(pairs)
    if kind is type(None) and item is None:
        return None
    if kind in (bool, int, float, str) and type(item) is kind:
        return item
    if kind is bytes and type(item) is int:
        section = reader.section()
        if section.nbytes != item:
            raise FrameError("length", "a field of bytes has another length than it says")
        reader.spend(item)
        return bytes(section)
    if kind is Tensor:
        state = reader.state(item)
        if list(state) != [""]:
            raise FrameError("type", "a tensor field is malformed")
        return state[""]
    if isinstance(kind, type) and hasattr(kind, "write") and hasattr(kind, "read"):
        return kind.read(item, reader)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        if not isinstance(item, list) or len(item) != len(hints):
            raise FrameError("type", f"a {kind.__name__} has another number of fields than this receiver's")
        return kind(**{name: _read(k, v, reader) for (name, k), v in zip(hints, item, strict=True)})
    raise FrameError("type", f"a field that must be {getattr(kind, '__name__', kind)} is not")


def pack(
    value: Any,
    *,
    layout: Layout | None = None,
    base: Base | None = None,
    coded: bool = True,
    lossy: Lossy | None = None,
    travels: bool = True,
) -> Frame:
    """A payload (or state: any dataclass of packable fields) as a frame.

    `layout`: the model both ends know; entries equal to its own travel without names and shapes. `base`: the
    message this value answers. `coded`: False stores arrays as they are. `lossy`: how values of Dense and Masked are
    rounded, and what comes of it (default: they are not). `travels`: whether somebody else reads it, who bounds its
    header. Raises TypeError for a field that cannot travel, naming it; UserError for `lossy` with a bare
    value, which cannot be rounded.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"only dataclasses travel, not {type(value).__name__}")
    kind = type(value)
    if lossy is not None and is_wire_value(value):
        raise UserError(
            f"lossy rounds what payloads hold, and a bare {kind.__name__} would travel unrounded: pack a payload "
            f"of which it is a field, @fb.payload class Message: state: {kind.__name__}"
        )
    writer = Writer(layout, base, coded, lossy)
    fields = [_write(k, getattr(value, name), writer, f"{kind.__name__}.{name}") for name, k in _hints(kind)]
    layout_hash = NO_HASH if layout is None else layout.hash
    base_hash = NO_HASH if base is None or not coded else base.digest[:16]
    return Frame(kind.__name__, fields, writer.sections, layout_hash, base_hash, travels)


def unpack(
    cls: type[T],
    data: bytes | bytearray | memoryview | Parsed,
    *,
    layout: Layout | None = None,
    base: Base | None = None,
    limit: int = LIMIT,
) -> T:
    """The payload of class `cls` in a frame; its tensors own their memory. `layout` and `base`: as it was packed with.

    Raises FrameError (and nothing else) for bytes that are not such a frame, or whose arrays take more than `limit`
    bytes, also once they are made dense (while it decodes, up to three times that, and 32 MiB for a sheet of images),
    or whose header has more items than suit that limit.
    """
    parsed = data if isinstance(data, Parsed) else Parsed(data, max(MOST_ITEMS, limit // PER_ITEM))
    if parsed.header.kind != cls.__name__:
        raise FrameError("type", f"the frame holds a {parsed.header.kind[:80]!r}, expected a {cls.__name__!r}")
    kind: Any = cls
    hints = _hints(kind)
    if len(parsed.header.fields) != len(hints):
        raise FrameError("type", f"a {cls.__name__} has another number of fields than this receiver's")
    reader = Reader(parsed, layout, base, limit)
    try:
        fields = {name: _read(k, v, reader) for (name, k), v in zip(hints, parsed.header.fields, strict=True)}
    except RecursionError:
        raise FrameError("header", "the frame's header is nested too deeply") from None
    reader.finished()
    return cls(**fields)


def pack_state(value: Any) -> Frame:
    """What stays where it is made, on disk or within what does, as a frame: not coded, of any size.

    Raises MethodError for an attribute that is no field: it would be gone the next time.
    """
    if dataclasses.is_dataclass(value) and hasattr(value, "__dict__"):
        declared = {each.name for each in dataclasses.fields(value)}
        if lost := [name for name in vars(value) if name not in declared]:
            raise MethodError(
                f"{type(value).__name__} was given {lost[0]!r}, which is no field of it and would be lost: declare it "
                "in the class, with its type"
            )
    return pack(value, coded=False, travels=False)


def unpack_state(cls: type[T], data: bytes | bytearray | memoryview | Parsed) -> T:
    """Undo `pack_state`. Raises FrameError if it is damaged, or another class's."""
    return unpack(cls, data if isinstance(data, Parsed) else Parsed(data, None), limit=ANY)
