"""Frames of formats 1 and 2, read: with a prelude of 64 bytes, a checksum for each section, and padding."""

from __future__ import annotations

import struct
from typing import Any, Protocol

import msgspec
from blake3 import blake3
from crc32c import crc32c

from fewbytes.base.errors import FrameError
from fewbytes.wire.header import HEADER_CAP, Parts, decode_header, section_at

MAGIC = b"FEWB"
NEWEST = 2  # major version of these formats
ALIGN = 8
DIGEST = 32
_FIXED = struct.Struct("<4sBBHIIQ16s16sI")  # the prelude without its own checksum
PRELUDE = _FIXED.size + 4
_NO_HASH = bytes(16)


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The header's contents: the payload's class name, its fields (arrays as codings) and its sections."""

    kind: str
    fields: list[Any]
    sections: list[tuple[int, int]]  # stored length in bytes, CRC32C


def read_older(view: memoryview, most_items: int | None) -> Parts:
    """The parts of a frame of format 1 or 2, given as for `Parsed`. Raises FrameError."""
    major, minor, header_length, checksum, body_length, *hashes = _prelude(view)
    start = PRELUDE + header_length + -header_length % ALIGN
    if (most_items is not None and header_length > HEADER_CAP) or start + body_length + DIGEST != view.nbytes:
        raise FrameError("length", f"the frame's lengths do not add up to its {view.nbytes} bytes")
    header = view[PRELUDE : PRELUDE + header_length]
    if crc32c(header) != checksum:
        raise FrameError("checksum", "the frame's header is damaged")
    digest = bytes(view[-DIGEST:])
    if blake3(view[:-DIGEST]).digest() != digest:
        raise FrameError("checksum", "the frame is damaged: its digest differs")
    if any(view[PRELUDE + header_length : start]):
        raise FrameError("padding", "the bytes after the header are not zero")
    parts = decode_header(header, Header, most_items)
    layout_hash, base_hash = (b"" if each == _NO_HASH else each for each in hashes)
    sections = _sections(view[start:-DIGEST], parts.sections)
    return Parts(f"{major}.{minor}", parts.kind, parts.fields, sections, layout_hash, base_hash, digest)


def _prelude(view: memoryview) -> tuple[int, int, int, int, int, bytes, bytes]:
    """Version (major, minor), the header's length and CRC32C, the body's length, the hashes of layout and base."""
    if view.nbytes < PRELUDE + DIGEST:
        raise FrameError("truncated", f"such a frame has at least {PRELUDE + DIGEST} bytes, these are {view.nbytes}")
    _, major, minor, flags, *rest, reserved = _FIXED.unpack(view[: _FIXED.size])
    if int.from_bytes(view[_FIXED.size : PRELUDE], "little") != crc32c(view[: _FIXED.size]):
        raise FrameError("checksum", "the frame's prelude is damaged")
    if not 1 <= major <= NEWEST or flags or reserved:
        raise FrameError("version", f"no version of fewbytes wrote such a frame (format {major}): update this end")
    return major, minor, *rest


def _sections(body: memoryview, table: list[tuple[int, int]]) -> list[memoryview]:
    sections, start = [], 0
    for length, checksum in table:
        section = section_at(body, start, length)
        stop = start + length + -length % ALIGN
        if stop > body.nbytes:
            raise FrameError("length", "a section reaches beyond the frame")
        if crc32c(section) != checksum:
            raise FrameError("checksum", "a section is damaged")
        if any(body[start + length : stop]):
            raise FrameError("padding", "the bytes after a section are not zero")
        sections.append(section)
        start = stop
    if start != body.nbytes:
        raise FrameError("length", "bytes are left over after the last section")
    return sections


class Contents(Protocol):
    """What a parsed frame contains."""

    kind: str
    fields: list[Any]
    sections: list[memoryview]


def written(parts: Contents, layout_hash: bytes) -> bytes:
    """The frame of format 2 with the contents of an uncoded frame, whose digest such frames name as their base."""
    body, table = b"", []
    for section in parts.sections:
        body += bytes(section) + bytes(-section.nbytes % ALIGN)
        table.append((section.nbytes, crc32c(section)))
    header = msgspec.msgpack.encode(Header(parts.kind, parts.fields, table))
    hashes = (layout_hash, _NO_HASH)
    fixed = _FIXED.pack(MAGIC, NEWEST, 0, 0, len(header), crc32c(header), len(body), *hashes, 0)
    front = fixed + struct.pack("<I", crc32c(fixed)) + header + bytes(-len(header) % ALIGN)
    return front + body + blake3(front + body).digest()
