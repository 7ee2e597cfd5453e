"""Typed payloads to frames and back: what a dataclass of packable fields becomes on the wire, and on disk."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeVar, dataclass_transform

from torch import Tensor

from fewbytes.base.errors import FrameError, MethodError, UserError
from fewbytes.base.state import State
from fewbytes.wire.frame import MOST_ITEMS, NO_HASH, Frame, Parsed
from fewbytes.wire.layout import Layout
from fewbytes.wire.lossy import Lossy
from fewbytes.wire.schema import UNMARKED, Leaf, leaves_of, schema_of
from fewbytes.wire.values import Base, Counted, Reader, Writer, entries_of, is_wire_value

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
        schema_of(made)
    return made


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
    header. Raises TypeError for a value that is not of its field's type, naming it; UserError for `lossy` with a bare
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
    fields = schema_of(kind).write(value, writer, kind.__name__, UNMARKED)
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
    reader = Reader(parsed, layout, base, limit)
    try:
        value: T = schema_of(cls).read(parsed.header.fields, reader)
    except RecursionError:
        raise FrameError("header", "the frame's header is nested too deeply") from None
    reader.finished()
    return value


def base_of(digest: bytes, message: Any) -> Base:
    """What a reply to a message is coded against: the wire values of the message, whose digest is given; where two of
    them share a name, the first one's tensor."""
    tensors: State = {}
    for leaf in leaves_of(message):
        if is_wire_value(leaf.value):
            tensors = {**leaf.value.states(), **tensors}
    return Base(digest, tensors)


def entries_in(payload: Any) -> dict[str, Tensor]:
    """The tensors, by name, of the wire values that a payload's own fields are, of equal names the last one's; none of
    None."""
    found: dict[str, Tensor] = {}
    for value in () if payload is None else vars(payload).values():
        found |= entries_of(value)
    return found


def counted(value: Any) -> Counted:
    """What papers count for a payload: the sum over its wire values."""
    return sum((leaf.value.counted() for leaf in leaves_of(value) if is_wire_value(leaf.value)), Counted())


def check_finite(leaves: Iterable[Leaf], perhaps: str = "is lr too high?") -> None:
    """Raises FrameError if numbers of a payload, given its leaves, are not all finite; `perhaps`: why."""
    for leaf in leaves:
        tensors = leaf.value.numbers() if is_wire_value(leaf.value) else leaf.tensors
        odd = [name or leaf.path for name, tensor in tensors.items() if not _finite(tensor)]
        odd += [leaf.path for number in leaf.floats if not math.isfinite(number)]
        if odd:
            raise FrameError("values", f"the values of {odd[0]!r} are not all finite ({perhaps})")


def _finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() and tensor.numel()):
        return True
    return all(end.isfinite() for end in tensor.aminmax())  # not-a-number is both ends


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
