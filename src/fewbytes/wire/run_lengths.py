"""Lossless coding of masks and of places: as bits, or as run lengths between the ones.

All functions are exact and bounded, as in `fewbytes.wire.coding`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fewbytes.base.errors import FrameError
from fewbytes.wire.sections import Array, Buffer, Sink, Source, deflate, get_plane, size_of

PACKED, RUNS_BEFORE_ONES, RUNS_BEFORE_ZEROS = 0, 1, 2  # codings of masks


def _run_lengths(positions: Array) -> Array:
    """Distances between rising positions as bytes; 255 means 255 plus the next byte."""
    runs = np.diff(positions, prepend=-1) - 1
    escapes, rest = np.divmod(runs, 255)
    ends = np.cumsum(escapes + 1) - 1
    out = np.full(int(ends[-1]) + 1 if ends.size else 0, 255, np.uint8)
    out[ends] = rest
    return out


def _positions(runs: Array) -> Array:
    ends = np.flatnonzero(runs != 255)
    return np.cumsum(runs, dtype=np.int64)[ends] + np.arange(ends.size)


def encode_bits(sink: Sink, mask: Array, coded: bool) -> list[Any]:
    """Write a flat bool array as one section: packed bits, or the run lengths before the rarer value."""
    header, data = mask_section(mask, coded)
    sink.section([data])
    return header


def mask_section(mask: Array, coded: bool) -> tuple[list[Any], Buffer]:
    """The header and the section of a flat bool array."""
    ones = int(np.count_nonzero(mask))
    packed = np.packbits(mask, bitorder="little")
    best: tuple[list[Any], Buffer] = ([PACKED, 0, packed.nbytes, ones], packed)
    if coded and mask.size:
        squeezed = deflate(packed)
        if squeezed is not None:
            best = ([PACKED, 1, packed.nbytes, ones], squeezed)
        rare = min(ones, mask.size - ones)
        if 8 * rare <= mask.size:
            kind = RUNS_BEFORE_ONES if ones == rare else RUNS_BEFORE_ZEROS
            runs = _run_lengths(np.flatnonzero(mask if kind == RUNS_BEFORE_ONES else ~mask))
            squeezed = deflate(runs)
            data: Buffer = runs if squeezed is None else squeezed
            if runs.nbytes <= packed.nbytes and size_of(data) < size_of(best[1]):
                best = ([kind, int(squeezed is not None), runs.nbytes, ones], data)
    return best


def decode_bits(source: Source, header: Any, size: int) -> Array:
    """Read the output of `encode_bits`: a bool array of `size`. Raises FrameError unless it is in canonical form."""
    if not (isinstance(header, list) and len(header) == 4 and all(type(x) is int for x in header)):
        raise FrameError("header", "a mask's header is malformed")
    kind, flag, nbytes, ones = header
    if kind not in (PACKED, RUNS_BEFORE_ONES, RUNS_BEFORE_ZEROS) or not 0 <= ones <= size:
        raise FrameError("coding", "unknown coding of a mask")
    if kind == PACKED:
        if nbytes != (size + 7) // 8:
            raise FrameError("length", "a mask's packed bits do not fit its size")
        packed = get_plane(source, flag, nbytes, np.uint8)
        mask = np.unpackbits(packed, bitorder="little")
        if mask[size:].any():
            raise FrameError("padding", "a mask's last bits are not zero")
        mask = mask[:size].view(bool)
    else:
        rare = ones if kind == RUNS_BEFORE_ONES else size - ones
        if not rare <= nbytes <= min(rare + size // 255, (size + 7) // 8):  # longer codings must be packed bits
            raise FrameError("length", "a mask's runs do not fit its size")
        runs = get_plane(source, flag, nbytes, np.uint8)
        positions = _positions(runs)
        if positions.size != rare or (nbytes and runs[-1] == 255) or (rare and positions[-1] >= size):
            raise FrameError("coding", "a mask's runs do not fit its size")
        mask = np.full(size, kind == RUNS_BEFORE_ZEROS)
        mask[positions] = kind == RUNS_BEFORE_ONES
    if int(np.count_nonzero(mask)) != ones:
        raise FrameError("coding", "a mask has another number of ones than stated")
    return mask


# ---------------------------------------------------------------------------------------------------- places


def _rice(runs: Array, shift: int) -> Array:
    """Run lengths in Rice's code, packed: their `shift` lowest bits, plane by plane, then the rest of each in unary."""
    ends = runs >> shift
    ends += 1
    np.cumsum(ends, out=ends)
    low = shift * runs.size
    bits = np.zeros(low + int(ends[-1]), np.uint8)
    for i in range(shift):
        np.bitwise_and(runs >> i, 1, out=bits[i * runs.size : (i + 1) * runs.size], casting="unsafe")
    ends += low - 1
    bits[ends] = 1
    return np.packbits(bits, bitorder="little")


def _unrice(data: Array, shift: int, count: int, total: int) -> Array:
    """Undo `_rice`: `count` run lengths that add up to at most `total`."""
    bits = np.unpackbits(data, bitorder="little")
    runs = np.flatnonzero(bits[shift * count :])
    if runs.size != count or (bits.size - shift * count - int(runs[-1]) - 1) // 8:
        raise FrameError("coding", "places are not as many as they must be, or take more bytes than they need")
    runs[1:] -= runs[:-1] + 1
    if int(runs.sum()) << shift > total:
        raise FrameError("coding", "places do not fit their range")
    runs <<= shift
    for i in range(shift):
        runs |= np.left_shift(bits[i * count : (i + 1) * count], i, dtype=np.int64)
    return runs


def _shift(runs: Array) -> int:
    """The shift that makes Rice's code of these run lengths shortest, near the logarithm of their mean."""
    near = int(runs.mean()).bit_length()
    return min(range(max(0, near - 2), near + 1), key=lambda shift: runs.size * shift + int((runs >> shift).sum()))


def encode_places(sink: Sink, places: Array, size: int, coded: bool) -> list[Any]:
    """Write distinct places below `size` as one section: as a mask, or in Rice's code of the run lengths if smaller.

    `places` are int64 and ascending. For random places, Rice's code takes at most 4.3 % more than log2 C(size, places)
    bits at any density (2 % up to one in four); zstandard's masks are smaller where the density varies.
    """
    mask = np.zeros(size, bool)
    mask[places] = True
    header, best = mask_section(mask, coded)
    rare = places if 2 * places.size <= size else np.flatnonzero(~mask)
    if coded and rare.size:
        runs = np.diff(rare, prepend=-1) - 1
        shift = _shift(runs)
        data = _rice(runs, shift)
        if data.nbytes < size_of(best):
            header, best = [shift, data.nbytes, places.size], data
    sink.section([best])
    return header


def decode_places(source: Source, header: Any, size: int) -> Array:
    """Read the output of `encode_places`: ascending int64 places. Raises FrameError for anything else."""
    if not (isinstance(header, list) and len(header) == 3 and all(type(x) is int for x in header)):
        return np.flatnonzero(decode_bits(source, header, size))
    shift, nbytes, count = header
    rare = min(count, size - count)
    if not (rare > 0 and 0 <= shift <= (size // rare).bit_length() and 0 < nbytes <= (size + 7) // 8):
        raise FrameError("header", "a coding of places does not fit their range")
    if 8 * nbytes < rare * (shift + 1):
        raise FrameError("length", "a section is shorter than its places")
    places = _unrice(get_plane(source, 0, nbytes, np.uint8), shift, rare, size - rare)
    places += 1
    np.cumsum(places, out=places)
    places -= 1
    if places[-1] >= size:
        raise FrameError("coding", "places do not fit their range")
    if rare == count:
        return places
    mask = np.ones(size, bool)
    mask[places] = False
    return np.flatnonzero(mask)
