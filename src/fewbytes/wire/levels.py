"""Entropy coding of quantisation indices ("levels") by asymmetric numeral systems; tables depend on nearby magnitudes.

A level's class summarises its neighbours. It is the sum, in half octaves, of its tensor's mean magnitude and the
deviations of its output channel, input channel and place in the kernel. These few small numbers travel first, so that
both ends know every class before decoding a level; all levels of a class are coded together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from functools import cache
from itertools import pairwise
from typing import Any

import constriction
import numpy as np

from fewbytes.base.errors import FrameError
from fewbytes.wire import coding
from fewbytes.wire.sections import Array, Sink, Source, deflate

MOST = (1 << 16) - 1  # maximum magnitude of a level
BLOCK = 1 << 18  # levels per coding block, sorted by class
WORTH = 32  # values per place for an axis to have numbers of its own
FEW = 256  # values for a class to have a table of its own
FAINT = 2.0**-7  # mean magnitude treated as zero
LEAST, GREATEST = -14, 32  # range of a tensor's own number: half octaves from FAINT to MOST
APART = 20  # maximum deviation of an axis from its tensor, in half octaves
FINE = 16  # magnitudes below have a symbol each; above, eight per octave
OCTAVE = 21  # frequencies in a table are powers of 2^(1 / OCTAVE), so that a byte each spans twelve octaves
SYMBOLS = FINE + 8 * 12
_FREQUENCIES = np.array([0, *(round(2.0 ** (12 + (n - 255) / OCTAVE)) for n in range(1, 256))], np.uint16)
"""Frequencies by the bytes of a table."""
_LOW_BITS = [max(0, (s - 8) >> 3) for s in range(SYMBOLS)]
_SPARE = np.array(_LOW_BITS, np.uint8)  # number of lowest bits not in the symbol
_LOWEST = np.array([s if s < FINE else 8 + (s & 7) << bits for s, bits in enumerate(_LOW_BITS)], np.uint16)

EDGE, UPWARD = Decimal("0.65"), Decimal("0.4")  # values reach a magnitude of 1 at EDGE, of n above at n - UPWARD
USUAL_FROM, USUAL_TO = -14, 56  # all lower classes have the same table, and all higher ones
# fmt: off
_SIXTYFOURTHS = (
    -245, -201, -186, -173, -162, -151, -139, -126, -112, -96, -79, -59, -38, -14, 13, 40,
    70, 100, 131, 162, 193, 225, 257,
)
# fmt: on
"""By class from USUAL_FROM, in 64ths of an octave: the scale of the distribution whose rounded values have the mean
magnitude 2^(class / 2) less FAINT. Above, it grows by half an octave a class."""

Shape = tuple[int, int, int]
Kept = Sequence[Array | None]


def encode_levels(sink: Sink, levels: Sequence[Array], negative: Array, folds: Sequence[Shape], kept: Kept) -> Any:
    """Write the magnitudes of tensors, flat uint16 arrays, and which of the non-zero ones are `negative`.

    `folds`: each tensor's shape as (output channels, input channels, the rest); `kept`: the places with a value, None
    for all. Returns the header.
    """
    numbers = [_numbers(m, fold, here) for m, fold, here in zip(levels, folds, kept, strict=True)]
    classes = _classes(numbers, folds, kept)
    magnitudes = np.concatenate([np.zeros(0, np.uint16), *levels])
    symbols, large = _symbols(magnitudes)
    most = max(2, int(symbols.max(initial=0)) + 1)  # the coder's minimum
    low, high, counts = _counts(classes, symbols, most)
    np.clip(classes, low, high, out=classes)
    classes -= low
    stored, usual = _tables(counts), usual_tables(low, high, most)
    travel = _bytes(counts, usual) > _bytes(counts, _FREQUENCIES[stored]) + _size(stored)
    tables = _FREQUENCIES[stored] if travel else usual
    coder = constriction.stream.stack.AnsCoder()
    models = [_model(table) for table in tables]
    for start in reversed(range(0, symbols.size, BLOCK)):  # a stack: the last symbol coded is the first decoded
        order, ends = _by_class(classes[start : start + BLOCK], len(models))
        chosen = symbols[start : start + BLOCK][order].astype(np.int32)
        for model, (begin, end) in reversed(list(zip(models, pairwise(ends), strict=True))):
            if begin < end:
                coder.encode_reverse(chosen[begin:end], model)
    flat = np.concatenate([np.zeros(0, np.int8), *numbers])
    headers = [
        coding.encode_numbers(sink, [flat.view(np.uint8)], None, False, True),
        coding.encode_numbers(sink, [stored.reshape(-1)], None, False, True) if travel else None,
    ]
    sink.section([coder.get_compressed().astype("<u4")])
    sink.section([np.packbits(negative, bitorder="little")])
    sink.section([_low_bits(magnitudes[large], _SPARE[symbols[large]])])
    return [low, high, most, *headers]


def decode_levels(
    source: Source, header: Any, folds: Sequence[Shape], kept: Kept, early: bool = False
) -> tuple[Array, Array]:
    """Read the output of `encode_levels`: all magnitudes, one tensor after another, uint16, and which of the non-zero
    ones are negative. `early`: tables of format 2, of frequencies. Raises FrameError for anything else."""
    match header:
        case [int(low), int(high), int(most), numbers_header, tables_header] if (
            -100 <= low <= high <= 100 and 2 <= most <= SYMBOLS
        ):
            pass
        case _:
            raise FrameError("header", "the coding of levels is malformed")
    widths = [width(fold) for fold in folds]
    flat = coding.decode_numbers(source, numbers_header, sum(widths), np.uint8, None, False).view(np.int8)
    if flat.size and (flat.min() < -APART or flat.max() > GREATEST):
        raise FrameError("coding", "the scale numbers of levels are out of bounds")
    numbers = np.split(flat, np.cumsum(widths)[:-1]) if widths else []
    classes = _classes(numbers, folds, kept)
    np.clip(classes, low, high, out=classes)
    classes -= low
    count = high - low + 1
    if tables_header is None and not early:
        tables = usual_tables(low, high, most)
    else:
        kind = np.uint16 if early else np.uint8
        stored = coding.decode_numbers(source, tables_header, count * most, kind, None, False).reshape(count, most)
        tables = stored if early else _FREQUENCIES[stored]
    data = source.section()
    if data.nbytes % 4:
        raise FrameError("length", "coded indices are not whole words")
    try:
        coder = constriction.stream.stack.AnsCoder(np.frombuffer(data, "<u4").astype(np.uint32))
    except ValueError:  # it ends in a zero
        raise FrameError("padding", "coded indices end in a zero word") from None
    models = [_model(table) for table in tables]
    symbols = np.empty(classes.size, np.uint8)
    for start in range(0, symbols.size, BLOCK):
        order, ends = _by_class(classes[start : start + BLOCK], count)
        here = symbols[start : start + BLOCK]
        for model, (begin, end) in zip(models, pairwise(ends), strict=True):
            if begin < end:
                if model is None:
                    raise FrameError("coding", "a class of levels has no table")
                here[order[begin:end]] = coder.decode(model, end - begin)
    if not coder.is_empty():
        raise FrameError("length", "coded indices are left over")
    del classes, coder  # free memory for the next steps
    signs = source.section()
    magnitudes = _from_low_bits(symbols, source.section())
    nonzero = int(np.count_nonzero(magnitudes))
    _check_bits(signs, nonzero)
    return magnitudes, _bits(signs, 0, nonzero)


def kinds(sizes: Sequence[Array], folds: Sequence[Shape], kept: Kept) -> Array:
    """Group values by the magnitude of their neighbours, judged by `sizes` (1: a mean value): a group number for each
    value, uint8, one tensor after another."""
    numbers = [_numbers(FINE * size, shape, here) for size, shape, here in zip(sizes, folds, kept, strict=True)]
    return (_classes(numbers, folds, kept) - (LEAST - 2 * APART)).astype(np.uint8)


def entropy(levels: Array, kinds: Array, weights: Array) -> float:
    """Estimated bits for the magnitudes and signs of values in these groups; each value counts `weights` times."""
    symbols, _ = _symbols(levels)
    counts = np.bincount(kinds.astype(np.int32) * SYMBOLS + symbols, weights)
    whole = np.bincount(kinds, weights)
    bits = float(weights[symbols > 0].sum()) + float(np.dot(weights, _SPARE[symbols]))
    return bits + float(_surprise(whole).sum() - _surprise(counts).sum())


def _surprise(counts: Array) -> Array:
    surprise: Array = counts * np.log2(np.maximum(counts, 1))
    return surprise


def fold(shape: Sequence[int]) -> Shape:
    """Output channels, input channels and the rest of a tensor; without channels, all is rest."""
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    return shape[0], shape[1], math.prod(shape[2:])


def width(shape: Shape) -> int:
    """Number of scale numbers of a tensor."""
    return 1 + sum(_own(shape))


def _own(shape: Shape) -> list[int]:
    """Number of scale numbers of each axis."""
    size = math.prod(shape)
    return [n if n > 1 and size // n >= WORTH else 0 for n in shape]


def _numbers(magnitudes: Array, shape: Shape, kept: Array | None) -> Array:
    """Magnitudes in half octaves, int8: the tensor's mean, then the deviation of each place of its axes."""
    values: Array = magnitudes
    if kept is not None:
        values = np.zeros(kept.size, magnitudes.dtype)
        values[kept] = magnitudes
    total, sums = _sums(values, shape)
    whole = _halves(total, magnitudes.size)
    parts = [np.clip(whole, LEAST, GREATEST)[None]]
    for axis, own in enumerate(_own(shape)):
        if own:
            others = tuple(other for other in range(3) if other != axis)
            per_place = values.size // own if kept is None else np.count_nonzero(kept.reshape(shape), axis=others)
            parts.append(np.clip(_halves(sums[axis], per_place) - whole, -APART, APART))
    return np.concatenate(parts).astype(np.int8)


def _sums(values: Array, shape: Shape) -> tuple[Any, list[Array]]:
    """The sum of all values, and the sums over the other axes of each of three, float64. Integers are added as
    such, which is exact and far faster."""
    if values.dtype.kind == "f":
        by_axis = [values.reshape(shape).sum(others, dtype=np.float64) for others in ((1, 2), (0, 2), (0, 1))]
        return values.sum(dtype=np.float64), by_axis
    kind = np.uint32 if int(values.max(initial=0)) * values.size < 1 << 32 else np.uint64
    rows = values.reshape(shape[0], shape[1] * shape[2])
    columns = rows.sum(0, dtype=kind).reshape(shape[1:])
    by_axis = [rows.sum(1, dtype=kind), columns.sum(1, dtype=kind), columns.sum(0, dtype=kind)]
    return columns.sum(dtype=np.float64), [each.astype(np.float64) for each in by_axis]


def _halves(sums: Array, counts: Any) -> Array:
    halves: Array = np.rint(2 * np.log2(sums / np.maximum(counts, 1) + FAINT)).astype(np.int64)
    return halves


def _classes(numbers: Sequence[Array], folds: Sequence[Shape], kept: Kept) -> Array:
    """The class of every value, one tensor after another, int8."""
    parts = [np.zeros(0, np.int8)]
    for given, shape, here in zip(numbers, folds, kept, strict=True):
        classes, at = np.full(shape, given[0], np.int8), 1
        for axis, own in enumerate(_own(shape)):
            if own:
                classes += given[at : at + own].reshape([-1 if axis == other else 1 for other in range(3)])
                at += own
        parts.append(classes.reshape(-1) if here is None else classes.reshape(-1)[here])
    return np.concatenate(parts)


def _span(counts: Array) -> tuple[int, int]:
    """The lowest and highest class to keep apart: those beyond have too few values. `counts`: by class from -128."""
    enough = np.flatnonzero(np.cumsum(counts) >= FEW)
    low = int(enough[0]) if enough.size else 128
    enough = np.flatnonzero(np.cumsum(counts[::-1]) >= FEW)
    high = 255 - int(enough[0]) if enough.size else low
    return min(low, high), max(low, high)


def _symbols(magnitudes: Array) -> tuple[Array, Array]:
    """The symbol of each magnitude, uint8, and the places of those whose lowest bits are not in the symbol."""
    symbols, large = magnitudes.astype(np.uint8), np.flatnonzero(magnitudes >= FINE)
    if large.size:
        values = magnitudes[large]
        spare = np.frexp(values.astype(np.float32))[1] - 4
        symbols[large] = (values >> spare.astype(np.uint16)) + 8 * spare  # 8 to 15, and eight for each bit
    return symbols, large


def _low_bits(magnitudes: Array, spare: Array) -> Array:
    """The bits that are not in symbols: the lowest of all magnitudes that have one, then the next."""
    planes = [(magnitudes[spare > bit] >> bit) & 1 for bit in range(int(spare.max(initial=0)))]
    return np.packbits(np.concatenate([np.zeros(0, np.uint16), *planes]).astype(bool), bitorder="little")


def _from_low_bits(symbols: Array, section: memoryview) -> Array:
    """The magnitudes of symbols, uint16; works in little memory, as do all decoders."""
    magnitudes, planes = symbols.astype(np.uint16), range(_LOW_BITS[int(symbols.max(initial=0))])
    counts = [int(np.count_nonzero(symbols >= FINE + 8 * bit)) for bit in planes]
    _check_bits(section, sum(counts))
    at = [sum(counts[:bit]) for bit in planes]
    for start in range(0, symbols.size, BLOCK):
        here = symbols[start : start + BLOCK]
        large = np.flatnonzero(here >= FINE)
        values = _LOWEST[here[large]]
        for bit in planes:
            having = np.flatnonzero(here[large] >= FINE + 8 * bit)
            values[having] |= np.left_shift(_bits(section, at[bit], having.size), bit, dtype=np.uint16)
            at[bit] += having.size
        magnitudes[start + large] = values
    return magnitudes


def _check_bits(section: memoryview, count: int) -> None:
    """Raises FrameError unless a section has exactly `count` bits."""
    if section.nbytes != (count + 7) // 8:
        raise FrameError("length", "a section of bits has another length than it must")
    if count % 8 and section[-1] >> count % 8:
        raise FrameError("padding", "the last bits of a section are not zero")


def _bits(section: memoryview, start: int, count: int) -> Array:
    """`count` bits of a section as bools, from bit `start`."""
    data = np.frombuffer(section, np.uint8)[start // 8 : (start + count + 7) // 8]
    return np.unpackbits(data, bitorder="little")[start % 8 :][:count].view(bool)


def _counts(classes: Array, symbols: Array, most: int) -> tuple[int, int, Array]:
    """The lowest and highest class to keep apart, and the frequency of each symbol in each of these, (classes,
    symbols); values of the classes beyond count as theirs."""
    total = np.zeros(256 * most, np.int64)
    shifted = classes.view(np.uint8) ^ 128  # from 0
    for start in range(0, symbols.size, BLOCK):
        here = shifted[start : start + BLOCK].astype(np.intp) * most + symbols[start : start + BLOCK]
        total += np.bincount(here, minlength=256 * most)
    by_class = total.reshape(256, most)
    low, high = _span(by_class.sum(1))
    counts = by_class[low : high + 1].copy()
    counts[0] += by_class[:low].sum(0)
    counts[-1] += by_class[high + 1 :].sum(0)
    return low - 128, high - 128, counts


def _tables(counts: Array) -> Array:
    """What travels of each class: by symbol 0 for one that does not occur, or the number of its frequency."""
    greatest = np.maximum(counts.max(1, keepdims=True), 1)
    octaves = np.log2(np.maximum(counts, 1) / greatest)
    tables: Array = np.where(counts > 0, np.clip(np.rint(255 + OCTAVE * octaves), 1, 255), 0)
    return tables.astype(np.uint8)


def usual_tables(low: int, high: int, most: int) -> Array:
    """Tables of the classes from `low` to `high` for `most` symbols where none travel, (classes, symbols)."""
    numbers = np.clip(
        np.arange(low, high + 1), USUAL_FROM, USUAL_TO
    )  # bounds the tables that a frame makes one compute
    return np.array([usual_table(int(n))[:most] for n in numbers], np.uint16)


@cache
def usual_table(number: int) -> tuple[int, ...]:
    """Frequencies of all symbols in a class: those of rounded values with a Laplace distribution, whose mean magnitude
    is what the class says. Computed in decimal numbers, which are the same on every machine."""
    first, last = USUAL_FROM, USUAL_FROM + len(_SIXTYFOURTHS) - 1
    octaves = _SIXTYFOURTHS[min(max(number, first), last) - first] + 32 * max(0, number - last)
    with localcontext(Context(prec=28, rounding=ROUND_HALF_EVEN)):
        scale = Decimal(2) ** (Decimal(octaves) / 64)
        beyond = [Decimal(1), (-EDGE / scale).exp()]  # the share of values that reach a magnitude, by symbol
        beyond += [(-(int(n) - UPWARD) / scale).exp() for n in [*_LOWEST[2:].astype(int), MOST + 1]]
        shares = [here - after for here, after in pairwise(beyond)]
        return tuple(max(1, round(4096 * share / max(shares))) for share in shares)


def _bytes(counts: Array, tables: Array) -> float:
    """Bytes of symbols with these frequencies (classes, symbols) under tables."""
    shares = np.maximum(tables, 0.5) / tables.sum(1, keepdims=True, dtype=np.float64).clip(min=1)
    return float(-(counts * np.log2(shares)).sum() / 8)


def _size(tables: Array) -> int:
    """Bytes that tables take in a message."""
    squeezed = deflate(tables.reshape(-1))
    return tables.nbytes if squeezed is None else len(squeezed)


def _model(table: Array) -> Any:
    """A table as a model for the coder; None if it is empty."""
    if not table.any():
        return None
    return constriction.stream.model.Categorical(table.astype(np.float64), perfect=False)


def _by_class(classes: Array, count: int) -> tuple[Array, list[int]]:
    """Indices of a block's values sorted by class, lowest first, and the bounds of each class."""
    ends = np.cumsum(np.bincount(classes, minlength=count)).tolist()
    return np.argsort(classes, kind="stable"), [0, *ends]
