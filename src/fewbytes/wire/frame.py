"""The frame: one payload as self-describing, checksummed bytes (format: see `fewbytes.wire`)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from crc32c import crc32c

from fewbytes.base.errors import FrameError
from fewbytes.wire.sections import Buffer

MAGIC = b"FEWB"
MAJOR, MINOR = 2, 0
OLDEST = 1  # oldest major version that is read
HEADER_CAP = 1 << 20  # bytes
MOST_ITEMS = 26_000  # in a header for any receiver: a thousand tensors in a dict; 80 bytes each in memory
ALIGN = 8
DIGEST = 32
NO_HASH = bytes(16)
_FIXED = struct.Struct("<4sBBHIIQ16s16sI")  # the prelude without its own checksum
PRELUDE = _FIXED.size + 4


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The header's contents: the payload's class name, its fields (arrays as codings) and its sections."""

    kind: str
    fields: list[Any]
    sections: list[tuple[int, int]]  # stored length in bytes, CRC32C


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


def _padding(length: int) -> int:
    return -length % ALIGN


class Frame:
    """A frame ready to send: its parts in order, without copies. `bytes(frame)` joins them; `digest` identifies it.

    A frame that stays on this machine (`travels` False) may have a header of any size.
    """

    def __init__(
        self, kind: str, fields: list[Any], sections: Sequence[list[Buffer]], layout_hash: bytes, base_hash: bytes,
        travels: bool = True,
    ) -> None:  # fmt: skip
        body, table = _body(sections)
        header = msgspec.msgpack.encode(Header(kind, fields, table))
        if travels and len(header) > HEADER_CAP:
            raise ValueError(
                f"the header of {kind} takes {len(header)} bytes, more than {HEADER_CAP}: too many entries"
            )
        body_length = sum(part.nbytes for part in body)
        fixed = _FIXED.pack(MAGIC, MAJOR, MINOR, 0, len(header), crc32c(header), body_length, layout_hash, base_hash, 0)
        front = fixed + struct.pack("<I", crc32c(fixed)) + header + bytes(_padding(len(header)))
        self.parts: list[memoryview] = [memoryview(front), *(part for part in body if part.nbytes)]
        hasher = blake3()
        for part in self.parts:
            hasher.update(part)
        self.digest: bytes = hasher.digest()
        self.parts.append(memoryview(self.digest))
        self._length = sum(part.nbytes for part in self.parts)

    @classmethod
    def of(cls, data: bytes) -> Frame:
        """A frame from its joined bytes."""
        frame = cls.__new__(cls)
        frame.parts, frame.digest, frame._length = [memoryview(data)], data[-DIGEST:], len(data)
        return frame

    def __len__(self) -> int:
        return self._length

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)

    def write_into(self, buffer: memoryview) -> int:
        """Write the frame at the start of `buffer` (bytes, writable); returns its length."""
        at = 0
        for part in self.parts:
            buffer[at : at + part.nbytes] = part
            at += part.nbytes
        return at


def _body(sections: Sequence[list[Buffer]]) -> tuple[list[memoryview], list[tuple[int, int]]]:
    """The sections one after another, and their (length, CRC32C) pairs for the header."""
    body: list[memoryview] = []
    table: list[tuple[int, int]] = []
    for parts in sections:
        views = [memoryview(np.ascontiguousarray(p).data if isinstance(p, np.ndarray) else p).cast("B") for p in parts]
        checksum = 0
        for view in views:
            checksum = crc32c(view, checksum)
        length = sum(view.nbytes for view in views)
        table.append((length, checksum))
        body += [*views, memoryview(bytes(_padding(length)))]
    return body, table


class Parsed:
    """A parsed and checked frame: its header, its sections as views, its hashes. Nothing is decoded yet.

    Raises FrameError for all but a complete, undamaged frame of a known version, with at most `most_items` header items
    (None: any number, in a header of any size, as in frames made on this machine).
    """

    def __init__(self, data: bytes | bytearray | memoryview, most_items: int | None = HEADER_CAP) -> None:
        view = memoryview(data).cast("B")
        major, minor, header_length, checksum, body_length, self.layout_hash, self.base_hash = _prelude(view)
        self.version = f"{major}.{minor}"
        start = PRELUDE + header_length + _padding(header_length)
        if (most_items is not None and header_length > HEADER_CAP) or start + body_length + DIGEST != view.nbytes:
            raise FrameError("length", f"the frame's lengths do not add up to its {view.nbytes} bytes")
        header = view[PRELUDE : PRELUDE + header_length]
        if crc32c(header) != checksum:
            raise FrameError("checksum", "the frame's header is damaged")
        self.digest = bytes(view[-DIGEST:])
        if blake3(view[:-DIGEST]).digest() != self.digest:
            raise FrameError("checksum", "the frame is damaged: its digest differs")
        if any(view[PRELUDE + header_length : start]):
            raise FrameError("padding", "the bytes after the header are not zero")
        self.header = _header(header, most_items)
        self.sections = _sections(view[start:-DIGEST], self.header.sections)


def _prelude(view: memoryview) -> tuple[int, int, int, int, int, bytes, bytes]:
    """Version (major, minor), the header's length and CRC32C, the body's length, the hashes of layout and base."""
    if view.nbytes < PRELUDE + DIGEST:
        raise FrameError("truncated", f"a frame has at least {PRELUDE + DIGEST} bytes, these are {view.nbytes}")
    magic, major, minor, flags, *rest, reserved = _FIXED.unpack(view[: _FIXED.size])
    if magic != MAGIC:
        raise FrameError("magic", "not a frame: the first four bytes are not 'FEWB'")
    if int.from_bytes(view[_FIXED.size : PRELUDE], "little") != crc32c(view[: _FIXED.size]):
        raise FrameError("checksum", "the frame's prelude is damaged")
    if not OLDEST <= major <= MAJOR:
        raise FrameError(
            "version", f"the frame has format {major}, this code reads {OLDEST} to {MAJOR}: update the older end"
        )
    if flags or reserved:
        raise FrameError("version", "the frame asks for a feature this code does not have: update this end")
    return major, minor, *rest


def _header(header: memoryview, most_items: int | None) -> Header:
    if most_items is not None and header.nbytes > most_items:  # an item takes at least a byte
        _check_items(header, most_items)
    try:
        return msgspec.msgpack.decode(header, type=Header)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError("header", f"the frame's header cannot be read: {error}") from None


def _sections(body: memoryview, table: list[tuple[int, int]]) -> list[memoryview]:
    sections, start = [], 0
    for length, checksum in table:
        stop = start + length + _padding(length)
        if length < 0 or stop > body.nbytes:
            raise FrameError("length", "a section reaches beyond the frame")
        section = body[start : start + length]
        if crc32c(section) != checksum:
            raise FrameError("checksum", "a section is damaged")
        if any(body[start + length : stop]):
            raise FrameError("padding", "the bytes after a section are not zero")
        sections.append(section)
        start = stop
    if start != body.nbytes:
        raise FrameError("length", "bytes are left over after the last section")
    return sections
