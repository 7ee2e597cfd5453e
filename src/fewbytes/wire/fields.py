"""Typed payloads to frames and back: how a dataclass of packable fields is stored on the wire and on disk."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from fewbytes.base.errors import FrameError, MethodError, UserError, with_article
from fewbytes.base.state import State
from fewbytes.wire.frame import Frame, Parsed
from fewbytes.wire.header import MOST_ITEMS
from fewbytes.wire.layout import Layout
from fewbytes.wire.lossy import Lossy
from fewbytes.wire.schema import UNMARKED, Kind, Leaf, Marks, leaves_of, schema_of, type_text
from fewbytes.wire.value import Counted, entries_of, is_wire_value
from fewbytes.wire.values import Base, FrameReader, FrameWriter

T = TypeVar("T")
LIMIT = 1 << 30  # default limit in bytes on the arrays of one payload
ANY = 1 << 62  # no limit: more than can exist
PER_ITEM = 1 << 14  # the limit's bytes per header item; MOST_ITEMS are always allowed


def _write(kind: Kind, value: Any, writer: FrameWriter, path: str, marks: Marks = UNMARKED) -> Any:
    """The header's item for a value; its arrays become sections. Raises TypeError for a value of another type."""
    match kind.form:
        case "optional" if value is None:
            return None
        case "optional" | "list" | "row" | "tuple" | "dict":
            inner = [_write(part, v, writer, at, own) for part, v, at, own in kind.inner(value, path, marks)]
            return [list(pair) for pair in zip(inner[::2], inner[1::2], strict=True)] if kind.form == "dict" else inner
        case "dataclass" if isinstance(value, kind.of):
            return [_write(part, v, writer, at, own) for part, v, at, own in kind.inner(value, path, marks)]
        case "wire" if isinstance(value, kind.of):
            writer.path, writer.marks, writer.position = path, marks, writer.position + 1
            return value.write(writer)
        case "tensor" if isinstance(value, Tensor):
            return writer.state({"": value})
        case "state":
            if not isinstance(value, Mapping):
                raise TypeError(f"{path}: {with_article(type(value))} cannot travel as a dict of tensors")
            try:
                return writer.state(value)
            except TypeError as error:
                raise TypeError(f"{path}: {error}") from None
        case "bytes" if isinstance(value, bytes):
            writer.section([value])
            return len(value)
        case "plain" if kind.of is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        case "plain" if type(value) is kind.of:
            return value
    remedy = f": give {kind.of.__name__}(…)" if kind.form == "wire" else ""
    raise TypeError(f"{path}: {with_article(type(value))} cannot travel as {with_article(type_text(kind.of))}{remedy}")


def _read(kind: Kind, item: Any, reader: FrameReader) -> Any:
    """Undo `_write`. Raises FrameError for an item that `_write` would not have written."""
    match kind.form:
        case "plain" if type(item) is kind.of:
            return item
        case "wire":
            reader.position += 1
            return kind.of.read(item, reader)
        case "state":
            return reader.state(item)
        case "tensor":
            state = reader.state(item)
            if list(state) != [""]:
                raise FrameError("type", "a tensor field is malformed")
            return state[""]
        case "optional":
            if item is not None and (not isinstance(item, list) or len(item) != 1):
                raise FrameError("type", "an optional field is malformed")
            return None if item is None else _read(kind.parts[0], item[0], reader)
        case "list" | "row" if isinstance(item, list):
            each = [_read(kind.parts[0], v, reader) for v in item]
            return each if kind.form == "list" else tuple(each)
        case "tuple" if isinstance(item, list):
            if len(item) != len(kind.parts):
                raise FrameError("type", "a tuple has another length than its type")
            return tuple(_read(part, v, reader) for part, v in zip(kind.parts, item, strict=True))
        case "dict" if isinstance(item, list):
            if not all(isinstance(pair, list) and len(pair) == 2 for pair in item):
                raise FrameError("type", "a dict is malformed")
            key, value = kind.parts
            found = {_read(key, k, reader): _read(value, v, reader) for k, v in item}
            if len(found) != len(item):
                raise FrameError("type", "a dict has a key twice")
            return found
        case "dataclass":
            least = kind.required if reader.own else len(kind.fields)
            if not isinstance(item, list) or not least <= len(item) <= len(kind.fields):
                raise FrameError("type", f"a {kind.of.__name__} has another number of fields than this receiver's")
            pairs = zip(kind.fields, item, strict=False)
            return kind.of(**{field.name: _read(field.kind, v, reader) for field, v in pairs})
        case "bytes" if type(item) is int:
            section = reader.section()
            if section.nbytes != item:
                raise FrameError("length", "a field of bytes has another length than stated")
            reader.spend(item)
            return bytes(section)
    raise FrameError("type", f"a field that must be a {type_text(kind.of)} is not")


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

    `layout`: the model both ends know; entries equal to its own travel without names and shapes. `base`: the message
    that this value answers. `coded`: False stores raw arrays. `lossy`: how values of Dense and Masked are rounded,
    updated with the results (default: no rounding). `travels`: whether a receiver with bounds on headers reads it.
    Raises TypeError, naming the field, for a value of another type than its field's; UserError for `lossy` with a bare
    value, which cannot be rounded.

    >>> import fewbytes as fb
    >>> import torch
    >>> values = fb.Dense({"w": torch.zeros(1000)})
    >>> raw, coded = fb.pack(values, coded=False), fb.pack(values)
    >>> len(coded) < 300 < 4000 < len(raw)
    True
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"only dataclasses travel, not {type(value).__name__}")
    kind = type(value)
    if lossy is not None and is_wire_value(value):
        raise UserError(
            f"lossy rounds the fields of payloads, and a bare {kind.__name__} would travel unrounded: pack a payload "
            f"with it as a field, @fb.payload class Message: state: {kind.__name__}"
        )
    writer = FrameWriter(layout, base, coded, lossy)
    fields = _write(schema_of(kind), value, writer, kind.__name__)
    layout_hash = b"" if layout is None else layout.hash
    base_hash = b"" if base is None or not coded else base.digest
    return Frame(kind.__name__, fields, writer.sections, layout_hash, base_hash, travels)


def unpack(
    cls: type[T],
    data: bytes | bytearray | memoryview | Parsed,
    *,
    layout: Layout | None = None,
    base: Base | None = None,
    limit: int = LIMIT,
) -> T:
    """The payload of class `cls` in a frame; its tensors own their memory. `layout`, `base`: those it was packed with.

    Raises only FrameError: for bytes that are not such a frame; for arrays over `limit` bytes, also in dense form
    (decoding takes up to three times that, and 32 MiB for a sheet of images); or for more header items than suit that
    limit.

    >>> import fewbytes as fb
    >>> import torch
    >>> data = bytes(fb.pack(fb.Dense({"w": torch.tensor([0.5, -2.0])})))
    >>> fb.unpack(fb.Dense, data).state
    {'w': tensor([ 0.5000, -2.0000])}
    >>> fb.unpack(fb.Masked, data)
    Traceback (most recent call last):
    fewbytes.base.errors.FrameError: the frame contains a 'Dense', expected a 'Masked' [type]
    """
    parsed = data if isinstance(data, Parsed) else Parsed(data, max(MOST_ITEMS, limit // PER_ITEM))
    return _unpacked(cls, parsed, FrameReader(parsed, layout, base, limit))


def _unpacked(cls: type[T], parsed: Parsed, reader: FrameReader) -> T:
    if parsed.kind != cls.__name__:
        raise FrameError("type", f"the frame contains a {parsed.kind[:80]!r}, expected a {cls.__name__!r}")
    try:
        value: T = _read(schema_of(cls), parsed.fields, reader)
    except RecursionError:
        raise FrameError("header", "the frame's header is nested too deeply") from None
    reader.finished()
    return value


def base_of(digest: bytes, message: Any) -> Base:
    """The base for coding a reply: the wire values of the message with this digest; of tensors that share a name, the
    first."""
    tensors: State = {}
    values = [leaf.value.states() for leaf in leaves_of(message) if is_wire_value(leaf.value)]
    for each in values:
        tensors = {**each, **tensors}
    return Base(digest, tensors, values)


def entries_in(payload: Any) -> dict[str, Tensor]:
    """Tensors by name in the wire values that are a payload's own fields; of equal names the last; empty for None."""
    found: dict[str, Tensor] = {}
    for value in () if payload is None else vars(payload).values():
        found |= entries_of(value)
    return found


def counted(value: Any) -> Counted:
    """The papers' count for a payload: the sum over its wire values."""
    return sum((leaf.value.counted() for leaf in leaves_of(value) if is_wire_value(leaf.value)), Counted())


def check_finite(leaves: Iterable[Leaf], hint: str = "is lr too high?") -> None:
    """Raises FrameError if numbers of a payload, given its leaves, are not all finite; `hint`: the likely reason."""
    for leaf in leaves:
        tensors = leaf.value.numbers() if is_wire_value(leaf.value) else leaf.tensors
        odd = [name or leaf.path for name, tensor in tensors.items() if not _finite(tensor)]
        odd += [leaf.path for number in leaf.floats if not math.isfinite(number)]
        if odd:
            raise FrameError("values", f"the values of {odd[0]!r} are not all finite ({hint})")


def _finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() and tensor.numel()):
        return True
    return all(end.isfinite() for end in tensor.aminmax())  # not-a-number is both minimum and maximum


def pack_state(value: Any) -> Frame:
    """A state kept on this machine, on disk or inside another state, as a frame: uncoded, of any size.

    Raises MethodError for an attribute that is not a field: it would be lost.
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
    """Undo `pack_state`; fields that an earlier version did not have get their defaults. Raises FrameError for a
    damaged frame, or one of another class."""
    parsed = data if isinstance(data, Parsed) else Parsed(data, None)
    reader = FrameReader(parsed, None, None, ANY)
    reader.own = True
    return _unpacked(cls, parsed, reader)
