"""The content of Flower's messages: an order or an answer, and a frame, as one blob."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import msgspec
from blake3 import blake3
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fewbytes.base.errors import FrameError
from fewbytes.engines.frames import FramePlace
from fewbytes.wire import Frame
from fewbytes.wire.frame import digest_of

T = TypeVar("T")
SMALL = 1_000_000  # bytes: up to this a frame is one object of Flower's, which costs the fewest requests


def write_content(order: bytes, frame: Frame | bytes | None = None, name: str = "", seal: bytes = b"") -> RecordDict:
    """A message's content: an order or answer, and a frame or its name in a shared folder. `seal`: an answer's seal
    (`sealed`)."""
    record = ConfigRecord({"order": order})
    if seal:
        record["seal"] = seal
    content = RecordDict({"fewbytes": record})
    if name:
        record["name"] = name
    elif frame is not None and len(frame) > SMALL:
        content["frame"] = ArrayRecord({"frame": Array("uint8", (len(frame),), "fewbytes.frame", bytes(frame))})
    elif frame is not None and len(frame):
        record["frame"] = bytes(frame)
    return content


def decoded(order: bytes, kind: type[T]) -> T:
    """The decoded order or answer. Raises FrameError if the bytes are not of that kind."""
    try:
        return msgspec.msgpack.decode(order, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError("header", f"what comes with a frame cannot be read: {error}") from None


def sealed(order: bytes, answer: bytes, frame: memoryview | bytes) -> bytes:
    """16 bytes that bind an answer, with its frame, to exactly this order.

    They are a digest, not a signature: TLS and the node's key authenticate the sender.
    """
    return blake3(len(order).to_bytes(8, "little") + order + answer + digest_of(frame)).digest()[:16]


def seal_of(content: RecordDict) -> bytes:
    """The seal of an answer; empty if it has none."""
    record = content.config_records.get("fewbytes")
    seal = None if record is None else record.get("seal")
    return seal if isinstance(seal, bytes) else b""


def split_frames(blob: memoryview, lengths: Sequence[int]) -> list[memoryview]:
    """Frames that travelled one after another. Raises FrameError for other lengths in all."""
    ends = list(itertools.accumulate(lengths))
    if (ends[-1] if ends else 0) != len(blob) or min(lengths, default=0) < 0:
        raise FrameError("length", f"{len(blob)} bytes came for frames of {list(lengths)}")
    return [blob[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def read_content(content: RecordDict, frame_folder: FramePlace | None = None) -> tuple[bytes, memoryview]:
    """Undo `write_content`; an empty view for no frame. Raises FrameError for anything else."""
    try:
        record = content.config_records["fewbytes"]
        order, frame = record["order"], cast(Any, record.get("frame", b""))
        if frame_folder is not None and "name" in record:
            frame = frame_folder.get(str(record["name"]))
        elif "frame" in content.array_records:
            frame = content.array_records["frame"]["frame"].data
    except (KeyError, TypeError, AttributeError):
        order, frame = None, None
    if not isinstance(order, bytes) or not isinstance(frame, bytes | memoryview):
        raise FrameError("header", "a message of Flower's does not hold what this package writes")
    return order, memoryview(frame)
