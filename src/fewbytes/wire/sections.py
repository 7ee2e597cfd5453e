"""Sections of a frame, written and read: raw, or compressed by zstandard if that is smaller.

All functions are exact. Decoders get the output's size from the receiver and allocate no more than that.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

from fewbytes.base.errors import FrameError
from fewbytes.wire.words import CONSTANT

Array = NDArray[Any]
Buffer = Array | bytes | memoryview
GAIN = 0.98  # a plane is compressed only to at most this fraction
_FREQUENCIES = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, target_length=0, write_checksum=False
)


class Sink(Protocol):
    """Accepts sections in order (the frame being written)."""

    def section(self, parts: list[Buffer]) -> None:
        """Add the next section, given its parts."""


class Source(Protocol):
    """Returns the sections in the same order (the frame being read). `early`: of format 1 or 2."""

    early: bool

    def section(self) -> memoryview:
        """The next section. Raises FrameError if there is none."""


class _Zstandard(threading.local):
    """Contexts, one set per thread: creating one costs as much as coding a small plane."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_FREQUENCIES)
        self.decompressor = zstandard.ZstdDecompressor()


_zstandard = _Zstandard()


def size_of(data: Buffer) -> int:
    """Bytes of a part of a section."""
    return len(data) if isinstance(data, bytes) else data.nbytes


def section_cost(nbytes: int) -> int:
    """Bytes that a section of this size takes in a frame, with its length and the mean padding of long ones."""
    return nbytes + (1 if nbytes < 128 else 2 if nbytes < 256 else 3 if nbytes < 1024 else 8)


def deflate(plane: Array) -> bytes | None:
    """The plane compressed by zstandard, or None if that saves nothing.

    A hash table of 64 places finds runs and few other matches: on byte planes that is both faster and smaller than
    any compression level, because the only gain is from byte frequencies. Noise is skipped at memory speed.
    """
    data = np.ascontiguousarray(plane).data.cast("B")
    if data.nbytes < 16:
        return None
    packed = _zstandard.compressor.compress(data)
    return packed if len(packed) <= GAIN * data.nbytes else None


def constant(plane: Array) -> int | None:
    """The flag of a plane of bytes that are all the same; None for another plane."""
    if plane.dtype != np.uint8 or not plane.size or plane[0] != plane[-1] or (plane != plane[0]).any():
        return None
    return CONSTANT + int(plane[0])


def inflate(data: memoryview, size: int) -> bytes:
    """Undo `deflate`. Raises FrameError unless the data have exactly `size` bytes; allocates no more than that."""
    try:
        if zstandard.frame_content_size(data) != size:
            raise FrameError("length", f"a compressed section does not hold the {size} bytes it must")
        return _zstandard.decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError("coding", f"a compressed section cannot be decompressed: {error}") from None


def get_plane(source: Source, flag: Any, size: int, dtype: Any) -> Array:
    """A plane of `size` elements: a view of the section if it was stored raw; without a section if it is constant."""
    if type(flag) is not int or not 0 <= flag < CONSTANT + 256 or (flag and not size):
        raise FrameError("header", "a section's flag is malformed")
    if flag >= CONSTANT:
        if np.dtype(dtype).itemsize > 1:
            raise FrameError("header", "a section's flag is malformed")
        return np.full(size, flag - CONSTANT, dtype)
    section = source.section()
    nbytes = size * np.dtype(dtype).itemsize
    if flag:
        return np.frombuffer(inflate(section, nbytes), dtype)
    if section.nbytes != nbytes:
        raise FrameError("length", f"a section of {section.nbytes} bytes has to have {nbytes}")
    return np.frombuffer(section, dtype)
