"""Lossless coding of numbers, as byte planes, against a base where there is one.

Every function here is exact: what is decoded equals what was encoded, bit for bit. A coding is chosen by measured
gain, never assumed. Decoders take the size they must produce from the receiver and allocate nothing beyond it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

from fewbytes.base.errors import FrameError

Array = NDArray[Any]
Buffer = Array | bytes | memoryview
BLOCK = 1 << 16  # elements worked on at a time, so that intermediate values stay in the cache
SAMPLE = 1 << 12  # elements looked at before choosing between coding with and without a base
RAW, PLANES, DELTA = 0, 1, 2  # codings of numbers
GAIN = 0.98  # a plane is compressed only if this is what remains, or less
SECTION = 24  # bytes a section costs at most besides its own: length, checksum, flag, padding
_FREQUENCIES = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, target_length=0, write_checksum=False
)


class Sink(Protocol):
    """Takes sections in order (the frame being written)."""

    def section(self, parts: list[Buffer]) -> None:
        """Take the parts of the next section."""


class Source(Protocol):
    """Gives the sections back in the same order (the frame being read)."""

    def section(self) -> memoryview:
        """The next section. Raises FrameError if there is none."""


# ---------------------------------------------------------------------------------------------------- planes


class _Zstandard(threading.local):
    """Contexts that are made once a thread: making one costs as much as coding a small plane."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_FREQUENCIES)
        self.decompressor = zstandard.ZstdDecompressor()


_zstandard = _Zstandard()


def size_of(data: Buffer) -> int:
    """Bytes of a part of a section."""
    return len(data) if isinstance(data, bytes) else data.nbytes


def deflate(plane: Array) -> bytes | None:
    """The plane through zstandard, or None where that gains nothing.

    A hash table of 64 places finds runs but hardly any other match: on byte planes that is both faster and smaller
    than any level, because all there is to gain is the bytes' frequencies. Noise is passed over at memory speed.
    """
    data = np.ascontiguousarray(plane).data.cast("B")
    if data.nbytes < 16:
        return None
    packed = _zstandard.compressor.compress(data)
    return packed if len(packed) <= GAIN * data.nbytes else None


def inflate(data: memoryview, size: int) -> bytes:
    """Undo `deflate`. Raises FrameError unless the data hold exactly `size` bytes; allocates no more than that."""
    try:
        if zstandard.frame_content_size(data) != size:
            raise FrameError("length", f"a compressed section does not hold the {size} bytes it must")
        return _zstandard.decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError("coding", f"a compressed section cannot be decompressed: {error}") from None


def get_plane(source: Source, flag: Any, size: int, dtype: Any) -> Array:
    """A plane of `size` elements: a view of the section where it was stored raw."""
    section = source.section()
    nbytes = size * np.dtype(dtype).itemsize
    if type(flag) is not int or flag not in (0, 1) or (flag and not nbytes):
        raise FrameError("header", "a section's flag is malformed")
    if flag:
        return np.frombuffer(inflate(section, nbytes), dtype)
    if section.nbytes != nbytes:
        raise FrameError("length", f"a section of {section.nbytes} bytes stands where {nbytes} must")
    return np.frombuffer(section, dtype)


def _cuts(width: int, delta: bool) -> list[tuple[int, Any]]:
    """Planes of a `width`-byte number as (shift, type), lowest first. Two raw mantissa bytes stay together."""
    if width == 4 and not delta:
        return [(0, np.uint16), (16, np.uint8), (24, np.uint8)]
    return [(8 * i, np.uint8) for i in range(width)]


def _rotated(words: Array, floating: bool, out: Array) -> Array:
    """The words with the sign bit moved last, so that a float's exponent fills its top byte."""
    if not floating:
        out[:] = words
        return out
    top = words.dtype.itemsize * 8 - 1
    np.left_shift(words, 1, out=out)
    out |= words >> top
    return out


def _unrotated(words: Array, floating: bool) -> None:
    if floating:
        sign = words << (words.dtype.itemsize * 8 - 1)
        np.right_shift(words, 1, out=words)
        words |= sign


def ordered(words: Array, floating: bool, out: Array | None = None) -> Array:
    """Floats as signed integers in the same order, so that near floats are near integers (its own inverse).

    `out`: where to put them, for floats, instead of a new array.
    """
    signed = words.view(f"i{words.dtype.itemsize}")
    if not floating:
        return signed
    top = words.dtype.itemsize * 8 - 1
    flipped: Array = np.right_shift(signed, top, out=out)
    flipped &= np.array((1 << top) - 1, signed.dtype)
    flipped ^= signed
    return flipped


def _difference(words: Array, base: Array, floating: bool, out: Array, spare: Array) -> Array:
    """Zig-zag of the integer difference to the ordered base: small magnitudes become small unsigned numbers."""
    kind = f"i{words.dtype.itemsize}"
    delta, sign = out.view(kind), spare.view(kind)
    np.subtract(ordered(words, floating, delta), base, out=delta)
    np.right_shift(delta, words.dtype.itemsize * 8 - 1, out=sign)
    delta <<= 1
    delta ^= sign
    return out


def _undifference(coded: Array, base: Array, floating: bool) -> None:
    """Undo `_difference`, in place."""
    signed = coded.view(f"i{coded.dtype.itemsize}")
    one = np.array(1, coded.dtype)
    sign = -(signed & np.array(1, signed.dtype))
    coded >>= one
    signed ^= sign
    signed += base
    if floating:
        ordered(coded, floating, sign)
        coded[:] = sign.view(coded.dtype)


def _planes(arrays: Sequence[Array], bases: Sequence[Array] | None, floating: bool) -> list[Array]:
    width = arrays[0].dtype.itemsize
    total = sum(a.size for a in arrays)
    cuts = _cuts(width, bases is not None)
    planes = [np.empty(total, dtype) for _, dtype in cuts]
    scratch, shifted = np.empty(BLOCK, arrays[0].dtype), np.empty(BLOCK, arrays[0].dtype)
    at = 0
    for i, array in enumerate(arrays):
        for start in range(0, array.size, BLOCK):
            words = array[start : start + BLOCK]
            n = words.size
            if bases is None:
                coded = _rotated(words, floating, scratch[:n])
            else:
                coded = _difference(words, bases[i][start : start + BLOCK], floating, scratch[:n], shifted[:n])
            for plane, (shift, _) in zip(planes, cuts, strict=True):
                if shift:
                    plane[at : at + n] = np.right_shift(coded, shift, out=shifted[:n])
                else:
                    plane[at : at + n] = coded  # the cast keeps the low bits
            at += n
    return planes


def _base_helps(arrays: Sequence[Array], bases: Sequence[Array], floating: bool) -> bool:
    """Whether differences to the base need fewer bits than the numbers, on a sample of the largest array."""
    i = max(range(len(arrays)), key=lambda k: arrays[k].size)
    step = max(1, arrays[i].size // SAMPLE)
    words, base = arrays[i][::step].copy(), bases[i][::step].copy()
    coded = _difference(words, base, floating, np.empty_like(words), np.empty_like(words))
    bits = np.log2(coded.astype(np.float64) + 1).mean()
    if floating:  # the exponent's top bits hardly vary: about five of its eight are free
        return bool(bits + 2 < 8 * words.dtype.itemsize - 5)
    return bool(bits < np.log2(words.astype(np.float64) + 1).mean())


def encode_numbers(
    sink: Sink, arrays: Sequence[Array], bases: Sequence[Array] | None, floating: bool, coded: bool
) -> list[Any]:
    """Write flat arrays of one unsigned type (the bits of the numbers) as sections; returns the coding's header.

    `bases`: arrays of the same sizes, made by `ordered`.
    """
    arrays = [a for a in arrays if a.size] if bases is None else arrays
    total = sum(a.size for a in arrays)
    if total == 0:
        return [RAW]
    if not coded:
        sink.section(list(arrays))
        return [RAW]
    delta = bases is not None and _base_helps(arrays, bases, floating)
    planes = _planes(arrays, bases if delta else None, floating)
    packed = [deflate(plane) for plane in planes]
    pairs = list(zip(planes, packed, strict=True))
    if sum(SECTION + (p.nbytes if d is None else len(d)) for p, d in pairs) > total * arrays[0].dtype.itemsize:
        sink.section(list(arrays))
        return [RAW]
    for plane, data in pairs:
        sink.section([plane if data is None else data])
    return [DELTA if delta else PLANES, [int(data is not None) for data in packed]]


def decode_numbers(
    source: Source, header: Any, total: int, dtype: Any, bases: Sequence[Array] | None, floating: bool
) -> Array:
    """Read what `encode_numbers` wrote: `total` numbers of an unsigned type, in fresh memory."""
    if not isinstance(header, list) or not header or type(header[0]) is not int or header[0] not in range(DELTA + 1):
        raise FrameError("coding", "unknown coding of numbers")
    if len(header) != 1 + (header[0] != RAW) or (total == 0 and header[0] != RAW):
        raise FrameError("header", "a coding of numbers is malformed")
    if total == 0:
        return np.empty(0, dtype)
    if header[0] == RAW:
        return get_plane(source, 0, total, dtype).copy()
    cuts = _cuts(np.dtype(dtype).itemsize, header[0] == DELTA)
    if not isinstance(header[1], list) or len(header[1]) != len(cuts):
        raise FrameError("header", "the planes of numbers do not fit their type")
    planes = [get_plane(source, flag, total, cut[1]) for flag, cut in zip(header[1], cuts, strict=True)]
    if header[0] == DELTA and bases is None:
        raise FrameError("base", "numbers are coded against a message this receiver does not hold: send in full")
    out = np.empty(total, dtype)
    at = 0
    for base in bases if header[0] == DELTA and bases is not None else [None]:
        size = total if base is None else base.size
        for start in range(0, size, BLOCK):
            here = slice(at + start, at + min(start + BLOCK, size))
            words = out[here]
            words[:] = planes[-1][here]
            for plane, (shift, _), (above, _) in zip(planes[-2::-1], cuts[-2::-1], cuts[:0:-1], strict=True):
                np.left_shift(words, above - shift, out=words)
                words |= plane[here]
            if base is None:
                _unrotated(words, floating)
            else:
                _undifference(words, base[start : start + BLOCK], floating)
        at += size
    return out
