"""The frame: one payload as self-describing, checksummed bytes (format: see `fewbytes.wire`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from fewbytes.base.errors import FrameError
from fewbytes.wire import older
from fewbytes.wire.header import HEADER_CAP, Parts, decode_header, section_at
from fewbytes.wire.sections import Buffer

MAGIC = b"FEW"
FORMAT = 3
LAYOUT, BASE = 0x80, 0x40  # flags in the version's byte
LAYOUT_HASH, BASE_HASH, DIGEST = 4, 8, 16  # bytes
ALIGN = 8
LONG = 1 << 10  # bytes from which on a section begins at a multiple of ALIGN, so that its numbers are read faster
LEAST = len(MAGIC) + 2 + DIGEST


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The header's contents: the payload's class name, its fields (arrays as codings), and its sections' lengths."""

    kind: str
    fields: list[Any]
    lengths: list[int] = []


class Frame:
    """A frame ready to send: its parts in order, without copies. `bytes(frame)` joins them; `digest` identifies it.

    A frame that stays on this machine (`travels` False) may have a header of any size.
    """

    def __init__(
        self, kind: str, fields: list[Any], sections: Sequence[list[Buffer]], layout_hash: bytes, base_hash: bytes,
        travels: bool = True,
    ) -> None:  # fmt: skip
        views = [[_view(part) for part in parts] for parts in sections]
        lengths = [sum(view.nbytes for view in each) for each in views]
        header = msgspec.msgpack.encode([kind, fields, lengths] if lengths else [kind, fields])
        if travels and len(header) > HEADER_CAP:
            raise ValueError(
                f"the header of {kind} takes {len(header)} bytes, more than {HEADER_CAP}: too many entries"
            )
        front = _front(layout_hash, base_hash) + _varint(len(header)) + header
        self.parts: list[memoryview] = [memoryview(front), *_body(views, lengths, len(front))]
        self.digest = _digest(self.parts)
        self.parts.append(memoryview(self.digest))
        self._length = sum(part.nbytes for part in self.parts)

    @classmethod
    def of(cls, data: bytes) -> Frame:
        """A frame from its joined bytes."""
        frame = cls.__new__(cls)
        frame.parts, frame.digest, frame._length = [memoryview(data)], digest_of(data), len(data)
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


def _front(layout_hash: bytes, base_hash: bytes) -> bytes:
    flags = (LAYOUT if layout_hash else 0) | (BASE if base_hash else 0)
    return MAGIC + bytes([FORMAT | flags]) + layout_hash[:LAYOUT_HASH] + base_hash[:BASE_HASH]


def digest_of(data: bytes | memoryview) -> bytes:
    """The digest that identifies a frame, of any format: its last bytes, unchecked."""
    return bytes(data[-older.DIGEST :] if data[: len(older.MAGIC)] == older.MAGIC else data[-DIGEST:])


def _digest(parts: list[memoryview]) -> bytes:
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest(DIGEST)


def _view(part: Buffer) -> memoryview:
    return memoryview(np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else part).cast("B")


def _padding(length: int, at: int) -> int:
    """Bytes before a section of this length that would begin at `at`."""
    return -at % ALIGN if length >= LONG else 0


def _body(views: list[list[memoryview]], lengths: list[int], at: int) -> list[memoryview]:
    """The sections one after another, from place `at` of the frame on."""
    body: list[memoryview] = []
    for parts, length in zip(views, lengths, strict=True):
        padding = _padding(length, at)
        body += [memoryview(bytes(padding)), *parts]
        at += padding + length
    return [part for part in body if part.nbytes]


def _varint(number: int) -> bytes:
    """A number in groups of seven bits, the lowest first; the top bit of a byte says that more follow."""
    low = number & 0x7F
    return bytes([low]) if number < 0x80 else bytes([low | 0x80]) + _varint(number >> 7)


class Parsed:
    """A parsed and checked frame: its class's name, its fields, its sections as views, its hashes, and whether it is
    `early`, of format 1 or 2. Nothing is decoded.

    Raises FrameError for all but a complete, undamaged frame of a known version, with at most `most_items` header items
    (None: any number, in a header of any size, as in frames made on this machine).
    """

    def __init__(self, data: bytes | bytearray | memoryview, most_items: int | None = HEADER_CAP) -> None:
        view = memoryview(data).cast("B")
        self.early = view[: len(older.MAGIC)] == older.MAGIC
        parts = (older.read_older if self.early else _read)(view, most_items)
        self.version, self.kind, self.fields, self.sections, *hashes = parts
        self.layout_hash, self.base_hash, self.digest = hashes


def _read(view: memoryview, most_items: int | None) -> Parts:
    """The parts of a frame of this format."""
    if view[: len(MAGIC)] != MAGIC:
        raise FrameError("magic", "not a frame: the first three bytes are not 'FEW'")
    if view.nbytes < LEAST:
        raise FrameError("truncated", f"a frame has at least {LEAST} bytes, these are {view.nbytes}")
    at = len(MAGIC) + 1
    flags = view[at - 1]
    if (version := flags & ~(LAYOUT | BASE)) != FORMAT:
        raise FrameError(
            "version", f"the frame has format {version}, this code reads 1 to {FORMAT}: update the older end"
        )
    digest = bytes(view[-DIGEST:])
    if blake3(view[:-DIGEST]).digest(DIGEST) != digest:
        raise FrameError("checksum", "the frame is damaged or incomplete: its digest differs")
    layout_hash = bytes(view[at : at + LAYOUT_HASH]) if flags & LAYOUT else b""
    at += len(layout_hash)
    base_hash = bytes(view[at : at + BASE_HASH]) if flags & BASE else b""
    length, at = _number(view[:-DIGEST], at + len(base_hash))
    body = view[:-DIGEST]
    if (most_items is not None and length > HEADER_CAP) or at + length > body.nbytes:
        raise FrameError("length", f"the frame's lengths do not add up to its {view.nbytes} bytes")
    header = decode_header(body[at : at + length], Header, most_items)
    sections = _sections(body, at + length, header.lengths)
    return Parts(str(version), header.kind, header.fields, sections, layout_hash, base_hash, digest)


def _number(view: memoryview, at: int) -> tuple[int, int]:
    """Undo `_varint` at a place; returns the number and the place after it."""
    number = 0
    for shift in range(0, 64, 7):
        if at >= view.nbytes:
            break
        number |= (view[at] & 0x7F) << shift
        at += 1
        if view[at - 1] < 0x80:
            if number >> shift or not shift:  # else a group too many
                return number, at
            break
    raise FrameError("length", "the length of the frame's header is malformed")


def _sections(body: memoryview, at: int, lengths: list[int]) -> list[memoryview]:
    """The sections of these lengths, from place `at` on."""
    sections = []
    for length in lengths:
        start = at + _padding(length, at)
        sections.append(section_at(body, start, length))
        if any(body[at:start]):
            raise FrameError("padding", "the bytes before a section are not zero")
        at = start + length
    if at != body.nbytes:
        raise FrameError("length", "bytes are left over after the last section")
    return sections
