"""Frames made by hand from the format's prose, of each version, with true checksums whatever they say."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
from blake3 import blake3
from crc32c import crc32c

LONG = 1024


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def varint(number: int) -> bytes:
    groups = []
    while number > 127:
        groups.append(number % 128 + 128)
        number //= 128
    return bytes([*groups, number])


def body_of(sections: Sequence[bytes], start: int) -> bytes:
    """The sections from place `start` of a frame of version 3 on."""
    body = b""
    for section in sections:
        if len(section) >= LONG:
            body += bytes(-(start + len(body)) % 8)
        body += section
    return body


def assemble(kind: Any, fields: Any, sections: Sequence[bytes] = (), *, major: int = 3, **stated: Any) -> bytes:
    """A frame of a version; `stated`: what it says instead of the truth (see the functions for one version)."""
    if major in (1, 2):
        return _assemble_older(kind, fields, sections, major=major, **stated)
    return _assemble(kind, fields, sections, major, **stated)


def _assemble(
    kind: Any,
    fields: Any,
    sections: Sequence[bytes],
    major: int,
    *,
    table: Any = None,
    header: bytes | None = None,
    body: bytes | None = None,
    magic: bytes = b"FEW",
    layout: bytes = b"",
    base: bytes = b"",
    header_length: bytes | None = None,
) -> bytes:
    if header is None:
        lengths = [len(s) for s in sections] if table is None else table
        header = msgspec.msgpack.encode([kind, fields, lengths] if lengths else [kind, fields])
    front = magic + bytes([major + 128 * bool(layout) + 64 * bool(base)]) + layout[:4] + base[:8]
    front += (varint(len(header)) if header_length is None else header_length) + header
    whole = front + (body_of(sections, len(front)) if body is None else body)
    return whole + blake3(whole).digest(16)


def _assemble_older(
    kind: Any,
    fields: Any,
    sections: Sequence[bytes],
    *,
    table: Any = None,
    header: bytes | None = None,
    body: bytes | None = None,
    after_header: bytes | None = None,
    prelude_checksum: int | None = None,
    **stated: Any,
) -> bytes:
    """`stated` are fields of the prelude."""
    if table is None:
        table = [[len(s), crc32c(s)] for s in sections]
    if header is None:
        header = msgspec.msgpack.encode([kind, fields, table])
    if body is None:
        body = b"".join(padded(s) for s in sections)
    values: dict[str, Any] = {
        "magic": b"FEWB", "major": 2, "minor": 0, "flags": 0,
        "header_length": len(header), "header_checksum": crc32c(header), "body_length": len(body),
        "layout": bytes(16), "base": bytes(16), "reserved": 0,
    }  # fmt: skip
    stated = {name: (value or bytes(16)) if name in ("layout", "base") else value for name, value in stated.items()}
    prelude = struct.pack("<4sBBHIIQ16s16sI", *(values | stated).values())
    prelude += struct.pack("<I", crc32c(prelude) if prelude_checksum is None else prelude_checksum)
    whole = prelude + header + (bytes(-len(header) % 8) if after_header is None else after_header) + body
    return whole + blake3(whole).digest()


def take_apart(frame: bytes) -> tuple[str, list[Any], list[bytes], dict[str, Any]]:
    """Kind, fields, sections, and the version and the two hashes of a good frame (empty: none)."""
    if frame[:4] == b"FEWB":
        return _take_apart_older(frame)
    assert frame[:3] == b"FEW"
    flags, at = frame[3], 4
    layout = frame[at : at + 4] if flags & 128 else b""
    at += len(layout)
    base = frame[at : at + 8] if flags & 64 else b""
    at += len(base)
    length = shift = 0
    while True:
        length += (frame[at] % 128) << shift
        at, shift = at + 1, shift + 7
        if frame[at - 1] < 128:
            break
    kind, fields, *lengths = msgspec.msgpack.decode(frame[at : at + length])
    at, sections = at + length, []
    for size in lengths[0] if lengths else []:
        at += -at % 8 if size >= LONG else 0
        sections.append(frame[at : at + size])
        at += size
    assert at == len(frame) - 16
    return kind, fields, sections, {"major": flags % 64, "layout": layout, "base": base}


def _take_apart_older(frame: bytes) -> tuple[str, list[Any], list[bytes], dict[str, Any]]:
    (length,) = struct.unpack_from("<I", frame, 8)
    kind, fields, table = msgspec.msgpack.decode(frame[64 : 64 + length])
    at, sections = 64 + length + -length % 8, []
    for size, _ in table:
        sections.append(frame[at : at + size])
        at += size + -size % 8
    assert at == len(frame) - 32
    hashes = {name: b"" if not any(each) else each for name, each in (("layout", frame[24:40]), ("base", frame[40:56]))}
    return kind, fields, sections, {"major": frame[4], **hashes}


def header_tree(frame: bytes) -> list[Any]:
    """The whole header of a good frame, as it is encoded."""
    kind, fields, sections, hashes = take_apart(frame)
    if hashes["major"] < 3:
        return [kind, fields, [[len(s), crc32c(s)] for s in sections]]
    return [kind, fields, [len(s) for s in sections]] if sections else [kind, fields]
