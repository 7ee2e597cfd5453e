"""Lossless coding of numbers, as byte planes, or as differences to a base.

All functions are exact: decoded numbers equal encoded ones, bit for bit. Measured gain decides between codings.
Decoders get the output's size from the receiver and allocate no more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from fewbytes.base.errors import FrameError
from fewbytes.wire.run_lengths import decode_bits, mask_section
from fewbytes.wire.sections import Array, Buffer, Sink, Source, constant, deflate, get_plane, section_cost, size_of
from fewbytes.wire.words import CHANGES, DIFFERENCES, EQUAL, PLANES, RAW

BLOCK = 1 << 16  # elements per block, so that intermediate values stay in the cache
ARGUMENTS = {RAW: 0, PLANES: 1, DIFFERENCES: 1, CHANGES: 2, EQUAL: 0}  # items of a coding after its number
SAMPLE = 1 << 12  # elements sampled to decide between coding with and without a base


def _cuts(width: int, together: bool) -> list[tuple[int, Any]]:
    """Planes of a `width`-byte number as (shift, type), lowest first; `together`: two lowest as one."""
    if together:
        return [(0, np.uint16), *((8 * i, np.uint8) for i in range(2, width))]
    return [(8 * i, np.uint8) for i in range(width)]


def _split(words: Array, planes: Sequence[Array], cuts: Sequence[tuple[int, Any]], at: int, spare: Array) -> None:
    """Write the words into the planes from `at` on; `spare` is a buffer of their size and type."""
    for plane, (shift, _) in zip(planes, cuts, strict=True):
        here = plane[at : at + words.size]
        if shift:
            here[:] = np.right_shift(words, shift, out=spare)
        else:
            here[:] = words  # the cast keeps the low bits


def _joined(planes: Sequence[Array], cuts: Sequence[tuple[int, Any]], here: slice, out: Array) -> Array:
    """Undo `_split` for a slice of the planes."""
    out[:] = planes[-1][here]
    for plane, (shift, _), (above, _) in zip(planes[-2::-1], cuts[-2::-1], cuts[:0:-1], strict=True):
        np.left_shift(out, above - shift, out=out)
        out |= plane[here]
    return out


def _rotated(words: Array, floating: bool, out: Array) -> Array:
    """The words with the sign bit moved to the lowest place, so that a float's exponent fills its top byte."""
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
    """Floats as signed integers in the same order, so that close floats are close integers (its own inverse).

    `out`: a buffer for the result, for floats, instead of a new array.
    """
    signed = words.view(f"i{words.dtype.itemsize}")
    if not floating:
        return signed
    top = words.dtype.itemsize * 8 - 1
    flipped: Array = np.right_shift(signed, top, out=out)
    flipped &= np.array((1 << top) - 1, signed.dtype)
    flipped ^= signed
    return flipped


def _undifference(coded: Array, base: Array, floating: bool) -> None:
    """Decode, in place, zig-zag differences to a base, in the order of `ordered` (format 1's coding)."""
    signed = coded.view(f"i{coded.dtype.itemsize}")
    one = np.array(1, coded.dtype)
    sign = -(signed & np.array(1, signed.dtype))
    coded >>= one
    signed ^= sign
    signed += ordered(base, floating)
    if floating:
        ordered(coded, floating, sign)
        coded[:] = sign.view(coded.dtype)


def _middle(dtype: Any) -> Array:
    """The offset added to differences, so that small ones of either sign change only the lowest plane."""
    width = np.dtype(dtype).itemsize
    return np.array(int.from_bytes(b"\x80" * (width - 1), "little"), dtype)


def _bits(words: Array) -> float:
    """The mean number of bits of numbers, as signed."""
    signed = words.view(f"i{words.dtype.itemsize}").astype(np.float32)
    return float(np.log2(np.abs(signed) * 2 + 1).mean())


def _sampled(arrays: Sequence[Array], bases: Sequence[Array], floating: bool) -> float | None:
    """The mean number of bits for a changed number's difference, from a sample of the largest array; None if the base
    does not help: all differences together would take as many bits as the numbers."""
    i = max(range(len(arrays)), key=lambda k: arrays[k].size)
    step = max(1, arrays[i].size // SAMPLE)
    words = arrays[i][::step]
    differences = words - bases[i][::step]
    bits = _bits(differences)
    # a float's exponent hardly varies in its top bits: about five of its eight are free
    helps = bits + 2 < 8 * words.dtype.itemsize - 5 if floating else bits < _bits(words)
    return bits * differences.size / max(1, int(np.count_nonzero(differences))) if helps else None


def _blocks(arrays: Sequence[Array]) -> Iterator[tuple[int, slice, slice]]:
    """Parts of arrays that fit the cache: the array's number, the slice of it, and the slice of all together."""
    at = 0
    for i, array in enumerate(arrays):
        for start in range(0, array.size, BLOCK):
            stop = min(start + BLOCK, array.size)
            yield i, slice(start, stop), slice(at + start, at + stop)
        at += array.size


def _together(arrays: Sequence[Array]) -> list[Array]:
    """The same numbers in fewer arrays, to save calls: small ones are joined up to the cache's size."""
    runs: list[list[Array]] = []
    size = 0
    for array in arrays:
        if not runs or size + array.size > BLOCK:
            runs.append([])
            size = 0
        runs[-1].append(array)
        size += array.size
    return [run[0] if len(run) == 1 else np.concatenate(run) for run in runs]


def _plain_planes(arrays: Sequence[Array], floating: bool) -> list[Array]:
    """Planes of the numbers."""
    kind = arrays[0].dtype
    cuts = _cuts(kind.itemsize, together=kind.itemsize == 4)
    planes = [np.empty(sum(a.size for a in arrays), dtype) for _, dtype in cuts]
    rotated, spare = np.empty(BLOCK, kind), np.empty(BLOCK, kind)
    for i, part, here in _blocks(arrays):
        words = arrays[i][part]
        _split(_rotated(words, floating, rotated[: words.size]), planes, cuts, here.start, spare[: words.size])
    return planes


def _changed(arrays: Sequence[Array], bases: Sequence[Array], together: bool) -> tuple[Array, list[Array]]:
    """A mask of the numbers that differ from the base, and planes of those differences."""
    kind = arrays[0].dtype
    cuts = _cuts(kind.itemsize, together)
    total = sum(a.size for a in arrays)
    mask, planes = np.empty(total, bool), [np.empty(total, dtype) for _, dtype in cuts]
    scratch, spare, middle = np.empty(BLOCK, kind), np.empty(BLOCK, kind), _middle(kind)
    changed = 0
    for i, part, here in _blocks(arrays):
        words = arrays[i][part]
        differences = np.subtract(words, bases[i][part], out=scratch[: words.size])
        np.not_equal(differences, 0, out=mask[here])
        kept = differences[mask[here]]
        kept += middle
        _split(kept, planes, cuts, changed, spare[: kept.size])
        changed += kept.size
    return mask, [plane[:changed] for plane in planes]


def encode_numbers(
    sink: Sink, arrays: Sequence[Array], bases: Sequence[Array] | None, floating: bool, coded: bool
) -> list[Any]:
    """Write flat arrays of one unsigned type (the bits of the numbers) as sections; return the coding's header.

    `bases`: arrays of the same sizes and type.
    """
    arrays = [a for a in arrays if a.size] if bases is None else arrays
    total = sum(a.size for a in arrays)
    if total == 0:
        return [RAW]
    if not coded:
        sink.section(list(arrays))
        return [RAW]
    sections: list[Buffer] = []
    noise = False
    bits = None if bases is None else _sampled(arrays, bases, floating)
    if bases is None or bits is None:
        header: list[Any] = [PLANES]
        planes = _plain_planes(_together(arrays), floating)
    else:
        noise = arrays[0].dtype.itemsize == 4 and bits > 16  # the two lowest bytes
        mask, planes = _changed(_together(arrays), _together(bases), together=noise)
        if not planes[0].size:
            return [EQUAL]
        places, section = mask_section(mask, coded)
        header, sections = [CHANGES, places], [section]
    flags: list[int] = []
    for i, plane in enumerate(planes):
        same, data = constant(plane), None
        if same is None:
            data = None if noise and i == 0 else deflate(plane)
            sections.append(plane if data is None else data)
        flags.append(int(data is not None) if same is None else same)
    item = [*header, flags]
    raw = section_cost(total * arrays[0].dtype.itemsize) + 2
    if sum(section_cost(size_of(each)) for each in sections) + len(msgspec.msgpack.encode(item)) > raw:
        sink.section(list(arrays))
        return [RAW]
    for section in sections:
        sink.section([section])
    return item


def decode_numbers(
    source: Source, header: Any, total: int, dtype: Any, bases: Sequence[Array] | None, floating: bool
) -> Array:
    """Read the output of `encode_numbers`: `total` numbers of an unsigned type, in new memory."""
    match header:
        case [int(kind), *rest] if type(kind) is int and kind in ARGUMENTS:
            if len(rest) != ARGUMENTS[kind] or (total == 0 and kind != RAW):
                raise FrameError("header", "a coding of numbers is malformed")
            if kind == DIFFERENCES and not source.early:
                raise FrameError("coding", "no frame of this format codes numbers so")
        case _:
            raise FrameError("coding", "unknown coding of numbers")
    if total == 0:
        return np.empty(0, dtype)
    if kind == RAW:
        return get_plane(source, 0, total, dtype).copy()
    if kind == EQUAL:
        return np.concatenate(_needed(bases))
    width = np.dtype(dtype).itemsize
    flags = rest[-1]
    together = width == 4 and (kind == PLANES or (kind == CHANGES and isinstance(flags, list) and len(flags) == 3))
    cuts = _cuts(width, together)
    if not isinstance(flags, list) or len(flags) != len(cuts):
        raise FrameError("header", "the planes of numbers do not fit their type")
    mask = decode_bits(source, rest[0], total) if kind == CHANGES else None
    size = total if mask is None else int(np.count_nonzero(mask))
    planes = [get_plane(source, flag, size, cut[1]) for flag, cut in zip(flags, cuts, strict=True)]
    out = np.empty(total, dtype)
    if kind == PLANES:
        for _, _, here in _blocks([out]):
            _unrotated(_joined(planes, cuts, here, out[here]), floating)
    elif mask is None:
        bases = _needed(bases)
        for i, part, here in _blocks(bases):
            _undifference(_joined(planes, cuts, here, out[here]), bases[i][part], floating)
    else:
        _take_changes(out, mask, planes, cuts, _together(_needed(bases)))
    return out


def _needed(bases: Sequence[Array] | None) -> Sequence[Array]:
    if bases is None:
        raise FrameError("base", "numbers are coded against a message this receiver does not hold: send in full")
    return bases


def _take_changes(
    out: Array, mask: Array, planes: Sequence[Array], cuts: Sequence[tuple[int, Any]], bases: Sequence[Array]
) -> None:
    """Undo `_changed`, into `out`."""
    scratch, middle = np.empty(BLOCK, out.dtype), _middle(out.dtype)
    changed = 0
    for i, part, here in _blocks(bases):
        chosen, words = mask[here], out[here]
        count = int(np.count_nonzero(chosen))
        kept = _joined(planes, cuts, slice(changed, changed + count), scratch[:count])
        kept -= middle
        words[:] = 0
        words[chosen] = kept
        words += bases[i][part]
        changed += count
