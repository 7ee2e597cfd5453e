"""A frame's header, read: its parts, and bounds on them before they are allocated."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import msgspec

from fewbytes.base.errors import FrameError

HEADER_CAP = 1 << 20  # bytes
MOST_ITEMS = 26_000  # in a header for any receiver: a thousand tensors in a dict; 80 bytes each in memory
T = TypeVar("T")


class Parts(NamedTuple):
    """A checked frame: nothing is decoded yet. The hashes may be shortened; empty for no layout, and no base."""

    version: str
    kind: str
    fields: list[Any]
    sections: list[memoryview]
    layout_hash: bytes
    base_hash: bytes
    digest: bytes


def _lengths() -> tuple[list[int], list[int]]:
    """By an item's first byte: its minimum size in bytes, and how many of them, after the first, encode its length."""
    least, length_bytes = [1] * 256, [0] * 256
    for tag in range(0xA0, 0xC0):
        least[tag] += tag - 0xA0  # a short text
    for first, more in ((0xC4, 0), (0xC7, 1), (0xD9, 0)):  # bytes, extensions, texts
        for i in range(3):
            least[first + i], length_bytes[first + i] = 1 + (1 << i) + more, 1 << i
    for first, sizes in ((0xCA, (5, 9, 2, 3, 5, 9, 2, 3, 5, 9, 3, 4, 6, 10, 18)), (0xDC, (3, 5, 3, 5))):
        least[first : first + len(sizes)] = sizes  # numbers, short extensions; numbers of items in arrays and maps
    return least, length_bytes


_LEAST, _LENGTH_BYTES = _lengths()


def _check_items(header: memoryview, most: int) -> None:
    """Raises FrameError for a header of more than `most` items (values, arrays, their contents), before allocating
    them: an empty array takes one byte here and 64 in memory."""
    at = 0
    for _ in range(most):
        if at >= header.nbytes:
            return
        tag = header[at]
        if _LENGTH_BYTES[tag]:
            at += int.from_bytes(header[at + 1 : at + 1 + _LENGTH_BYTES[tag]], "big")
        at += _LEAST[tag]
    if at < header.nbytes:
        raise FrameError("length", f"the frame's header has more than the {most} items this receiver reads")


def decode_header(header: memoryview, kind: type[T], most_items: int | None) -> T:
    """The header as a struct. Raises FrameError for another one, and for more than `most_items` (None: any number)."""
    if most_items is not None and header.nbytes > most_items:  # an item takes at least a byte
        _check_items(header, most_items)
    try:
        return msgspec.msgpack.decode(header, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError("header", f"the frame's header cannot be read: {error}") from None


def section_at(body: memoryview, start: int, length: int) -> memoryview:
    """A section of the body. Raises FrameError for one that reaches beyond it."""
    if length < 0 or start + length > body.nbytes:
        raise FrameError("length", "a section reaches beyond the frame")
    return body[start : start + length]
