"""Lossy coding: rounding with a dead zone, then entropy coding; the error is kept for error feedback."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbytes.base.errors import FrameError
from fewbytes.base.rate import Rate
from fewbytes.base.state import State
from fewbytes.wire.grid import Grid
from fewbytes.wire.layout import DTYPES, Entry, Place
from fewbytes.wire.levels import BLOCK, MOST, Shape, decode_levels, encode_levels, entropy, fold, kinds, width
from fewbytes.wire.sections import Array, Sink, Source
from fewbytes.wire.words import DIFFERENCE, ITSELF, ON_GRID

ZERO, UP = 0.65, 0.4  # in steps: values below ZERO become 0, others up to n + 1 - UP become n
POINTS = 3  # magnitudes with their own mean position inside the step: 1, 2, and all from 3 on
FINENESS = 127  # resolution of that position, in parts of half a step
FINE = 4.0  # bits for a value of tensors that are rounded finely
EVEN = [0] * POINTS  # a level n represents n steps exactly
AHEAD = [51, 0, 0]  # used instead for means with error feedback: 1 represents 1.2 steps
SAMPLE = 1 << 16  # values sampled to find the step
FINEST, COARSEST = -14, 6  # range of the step: powers of 2 of the root mean square of the values
NUMBER = 3.0  # bits for a scale number of a tensor or axis
CLOSE, TRIES = 0.02, 12  # relative tolerance on the wanted size, and maximum number of steps tried
TINY, FARTHEST = np.finfo(np.float32).tiny, float(np.finfo(np.float32).max)  # minimum and maximum of a step


@dataclass
class Lossy:
    """How the values of one message or reply are rounded, and the results.

    `exact`: names of tensors that stay unchanged, as do all in fields marked EXACT. `residual`: earlier rounding errors
    of a tensor, by its field's path and its name. They are added before rounding (error feedback: Seide et al. 2014)
    and updated after, except in fields marked FRESH. `averaged`: whether the receiver averages many such replies.
    `grid`: of differences to the last message, if they are on one. `fine`: names of `exact` tensors that are rounded
    after all, to FINE bits, where they have a base. `values`: number of rounded values; `left`: number of unchanged
    values; `energy` and `lost`: squared norms of the rounded values and of the error, without `fine` ones.
    """

    rate: Rate
    exact: Set[str] = frozenset()
    residual: dict[str, State] = field(default_factory=dict)
    averaged: bool = False
    grid: Grid | None = None
    fine: Set[str] = frozenset()
    values: int = 0
    left: int = 0
    energy: float = 0.0
    lost: float = 0.0

    @property
    def nmse(self) -> float:
        """The squared error divided by the squared norm of all rounded values."""
        return self.lost / self.energy if self.energy else 0.0

    def bits_a_value(self, nbytes: int) -> float:
        """Bits for each value, also unchanged ones, of a frame of `nbytes`; 0 if nothing was rounded."""
        return 8 * nbytes / (self.values + self.left) if self.values else 0.0


def round_values(
    sink: Sink,
    values: Sequence[Tensor],
    places: Sequence[Place],
    bases: Sequence[Tensor | None],
    lossy: Lossy,
    path: str,
    lasting: Callable[[Entry], bool] = lambda entry: True,
) -> list[Any] | None:
    """Round and write values, flat and of one type, except the `exact` ones; return the header: way of each tensor,
    step, points, levels. Return None and write nothing if there is nothing to round, or no finite number. `bases`: the
    answered message's values at the same places. `lasting`: whether a tensor's error is kept for the next reply; values
    that are new each round, such as prototypes, need none.
    """
    ways, wanted, here = bytearray(len(values)), [], []
    for i, (value, place, base) in enumerate(zip(values, places, bases, strict=True)):
        if value.is_floating_point() and value.numel() and place.entry.name not in lossy.exact:
            ways[i], rest = _wanted(value.detach().cpu().reshape(-1).float(), base)
            lost = _lost(lossy, path, place.entry)
            wanted.append(rest.numpy() if lost is None else rest.numpy() + _at(lost.reshape(-1).numpy(), place.kept))
            here.append(place)
        else:
            lossy.left += value.numel()
    flat = np.concatenate([np.zeros(0, np.float32), *wanted])
    peak = _peak(flat)
    if not flat.size or not math.isfinite(peak):
        return None
    energy = _energy(flat, peak)
    step = _best_step(wanted, here, lossy.rate, energy)
    step = np.float32(min(float(step), 0.99 * peak / ZERO, FARTHEST)) if peak else step  # so that not all becomes 0
    step = max(step, np.float32(peak / (MOST - 1)), TINY)  # so that no value exceeds the maximum level
    if not step < math.inf:
        return None
    magnitudes = _magnitudes(flat, step)
    later = lossy.averaged and all(lasting(place.entry) for place in here)
    # values that accumulate until they pass ZERO average just there: if sent so, all clients would lag the same way
    points = AHEAD if later else _points(flat, magnitudes, step)
    lossy.energy += energy
    header = _encoded(sink, flat, magnitudes, here, step, points)
    lossy.lost += _energy(flat, peak)
    _keep(lossy, path, flat, here, lasting)
    return [bytes(ways), float(step), points, header]


def round_on_grid(
    sink: Sink, values: Sequence[Tensor], places: Sequence[Place], before: Sequence[Tensor | None], lossy: Lossy,
    path: str,
) -> list[Any] | None:  # fmt: skip
    """As `round_values`, of differences to the values `before`, on the grid of `lossy`; tensors without stay exact."""
    ways, wanted, here = bytearray(len(values)), [], []
    for i, (value, place, base) in enumerate(zip(values, places, before, strict=True)):
        if base is not None and value.numel() and place.entry.name not in lossy.exact:
            ways[i], lost = ON_GRID, _lost(lossy, path, place.entry)
            rest = (value.detach().cpu().reshape(-1) - base).float().numpy()
            wanted.append(rest if lost is None else rest + _at(lost.reshape(-1).numpy(), place.kept))
            here.append(place)
        else:
            lossy.left += value.numel()
    grid, flat = lossy.grid, np.concatenate([np.zeros(0, np.float32), *wanted])
    peak = _peak(flat)
    if grid is None or not flat.size or not math.isfinite(peak):
        return None
    energy = _energy(flat, peak)
    step = grid.step or grid.unit
    if peak:
        best = float(_best_step(wanted, here, lossy.rate, energy)) if not grid.step else step
        step = grid.choose(path, max(best, grid.unit, peak / (MOST - 1)), max(0.99 * peak / ZERO, grid.unit))
    if peak / step > MOST - 1:
        return None
    magnitudes = _magnitudes(flat, step)
    lossy.energy += energy
    header = _encoded(sink, flat, magnitudes, here, step, EVEN)
    lossy.lost += _energy(flat, peak)
    _keep(lossy, path, flat, here, lambda entry: True)
    return [bytes(ways), float(step), EVEN, header]


def round_finely(
    sink: Sink, values: Sequence[Tensor], places: Sequence[Place], bases: Sequence[Tensor | None], lossy: Lossy,
    path: str,
) -> list[Any] | None:  # fmt: skip
    """As `round_values`, of the differences of `fine` tensors to their bases. What is above 0, as variances are, stays
    so: where its difference would take it below, that is smaller."""
    if lossy.grid is not None and lossy.grid.step:
        return None
    ways, wanted, here, lowest = bytearray(len(values)), [], [], []
    for i, (value, place, base) in enumerate(zip(values, places, bases, strict=True)):
        if base is not None and value.numel() and value.is_floating_point() and place.entry.name in lossy.fine:
            ways[i], lost = DIFFERENCE, _lost(lossy, path, place.entry)
            before = base.float().numpy()
            rest = value.detach().cpu().reshape(-1).float().numpy() - before
            wanted.append(rest if lost is None else rest + _at(lost.reshape(-1).numpy(), place.kept))
            lowest.append(before if bool((value > 0).all()) else np.full(before.shape, np.inf, np.float32))
            here.append(place)
    flat = np.concatenate([np.zeros(0, np.float32), *wanted])
    peak = _peak(flat)
    if not peak or not math.isfinite(peak):
        return None
    step = max(_best_step(wanted, here, Rate(FINE), _energy(flat, peak)), np.float32(peak / (MOST - 1)), TINY)
    magnitudes = _magnitudes(flat, step)
    fits = np.clip(np.ceil(np.concatenate(lowest) / step) - 1, 0, MOST).astype(np.uint16)
    magnitudes = np.where(flat < 0, np.minimum(magnitudes, fits), magnitudes)
    header = _encoded(sink, flat, magnitudes, here, step, EVEN)
    _keep(lossy, path, flat, here, lambda entry: True)
    lossy.left -= flat.size
    return [bytes(ways), float(step), EVEN, header]


def _encoded(
    sink: Sink, flat: Array, magnitudes: Array, places: Sequence[Place], step: Any, points: Sequence[int]
) -> list[Any]:
    """Write the levels of values, which become what rounding lost; returns the levels' header."""
    cuts = np.cumsum([place.size for place in places])[:-1]
    folds, kept = [fold(place.entry.shape) for place in places], [place.kept for place in places]
    negative = np.concatenate([flat[here] < 0 for here in _nonzero(magnitudes)] or [np.zeros(0, bool)])
    header: list[Any] = encode_levels(sink, np.split(magnitudes, cuts), negative, folds, kept)
    for here, values in _rounded(magnitudes, negative, step, points):
        flat[here] -= values
    return header


def _keep(lossy: Lossy, path: str, missing: Array, places: Sequence[Place], lasting: Callable[[Entry], bool]) -> None:
    """Note that values at these places were rounded, and keep what is `missing` of them."""
    lossy.values += missing.size
    cuts = np.cumsum([place.size for place in places])[:-1]
    for place, part in zip(places, np.split(missing, cuts), strict=True):
        if lasting(place.entry):
            lost = _left(place, part, _lost(lossy, path, place.entry))
            lossy.residual.setdefault(path, {})[place.entry.name] = lost


def _best_step(wanted: Sequence[Array], places: Sequence[Place], rate: Rate, energy: float) -> Any:
    """The step at which values take the rate's bits."""
    size = sum(value.size for value in wanted)
    scale = np.float32(math.sqrt(energy / size)) or np.float32(1)
    return scale * np.float32(rate.step or _step([value / scale for value in wanted], places, rate.bits))


def rounded_values(
    source: Source, header: Any, places: Sequence[Place], bases: Sequence[Tensor | None], early: bool = False
) -> list[Tensor | None]:
    """Read the output of `round_values`: flat tensors, None for unrounded ones. `early`: as in `decode_levels`. Raises
    FrameError."""
    match header:
        case [bytes(ways), float(step), list(points), inner] if len(ways) == len(places):
            pass
        case _:
            raise FrameError("header", "rounded values are malformed")
    if (
        not 0 < step <= FARTHEST
        or len(points) != POINTS
        or any(type(p) is not int or abs(p) > FINENESS for p in points)
    ):
        raise FrameError("coding", "the steps of rounded values are out of bounds")
    here = [place for place, way in zip(places, ways, strict=True) if way]
    if max(ways, default=0) > ON_GRID or not all(DTYPES[place.entry.dtype].is_floating_point for place in here):
        raise FrameError("type", "rounded values are not floating-point numbers")
    folds, kept = [fold(place.entry.shape) for place in here], [place.kept for place in here]
    magnitudes, negative = decode_levels(source, inner, folds, kept, early)
    flat = np.zeros(magnitudes.size, np.float32)
    for chosen, values in _rounded(magnitudes, negative, step, points):
        flat[chosen] = values
    parts = iter(torch.from_numpy(flat).split([p.size for p in here]))
    out: list[Tensor | None] = []
    for place, way, base in zip(places, ways, bases, strict=True):
        value = next(parts).to(DTYPES[place.entry.dtype]) if way else None
        if value is not None and way != ITSELF:
            if base is None:
                raise FrameError("base", "values are coded against a message this receiver does not hold: send in full")
            value = value + base
        out.append(value)
    return out


def _wanted(value: Tensor, base: Tensor | None) -> tuple[int, Tensor]:
    """How a tensor travels, and what is rounded: the tensor or, if smaller, its difference to the base."""
    if base is not None:
        difference = value - base.float()
        peak = float(value.abs().max())
        if _energy(difference.numpy(), peak) <= _energy(value.numpy(), peak):
            return DIFFERENCE, difference
    return ITSELF, value


def _peak(values: Array) -> float:
    """The largest absolute value; NaN if there is one."""
    return float(np.maximum(values.max(initial=0), -values.min(initial=0)))


def _energy(values: Array, peak: float) -> float:
    """The squared norm of values, none far above the `peak`. Computed by NumPy: PyTorch's result depends on memory
    alignment."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = values / np.float32(peak or 1)
        return float(np.dot(scaled, scaled)) * peak**2


def _lost(lossy: Lossy, path: str, entry: Entry) -> Tensor | None:
    """Earlier rounding error of a tensor; None if there is none, or it has another shape."""
    lost = lossy.residual.get(path, {}).get(entry.name)
    return None if lost is None or lost.shape != entry.shape else lost


def _at(values: Array, kept: Array | None) -> Array:
    return values if kept is None else values[kept]


def _left(place: Place, missing: Array, before: Tensor | None) -> Tensor:
    """A tensor's new error: `missing`, and the error `before` at places that were not sent."""
    lost = missing.copy()
    if place.kept is not None:
        lost = np.zeros(place.entry.size, np.float32) if before is None else before.reshape(-1).numpy().copy()
        lost[place.kept] = missing
    return torch.from_numpy(lost).view(place.entry.shape)


def _magnitudes(values: Array, step: Any) -> Array:
    """The magnitude of each value's level, uint16; larger ones are clipped, and error feedback corrects them."""
    levels = np.empty(values.size, np.uint16)
    for start in range(0, values.size, BLOCK):
        scaled = np.abs(values[start : start + BLOCK])
        scaled *= np.float32(1) / np.float32(step)
        nonzero = scaled >= ZERO
        scaled += np.float32(UP)
        np.minimum(scaled, MOST, out=scaled)
        np.multiply(scaled.astype(np.uint16), nonzero, out=levels[start : start + BLOCK])
    return levels


def _points(values: Array, magnitudes: Array, step: Any) -> list[int]:
    """The mean position inside the step of the values of each of POINTS magnitudes, in parts of half a step."""
    points = []
    for n in range(1, POINTS + 1):
        chosen = magnitudes == n if n < POINTS else magnitudes >= n
        inside = np.abs(values[chosen]).astype(np.float64) / float(step) - magnitudes[chosen]
        points.append(int(np.clip(np.rint(2 * FINENESS * inside.mean()), -FINENESS, FINENESS)) if inside.size else 0)
    return points


def _nonzero(magnitudes: Array) -> Iterator[Array]:
    """The places of levels that are not 0, block by block."""
    for start in range(0, magnitudes.size, BLOCK):
        yield np.flatnonzero(magnitudes[start : start + BLOCK] != 0) + start


def _rounded(magnitudes: Array, negative: Array, step: Any, points: Sequence[int]) -> Iterator[tuple[Array, Array]]:
    """The places of levels that are not 0, and the float32 values that they represent, block by block."""
    offsets, at = np.array([0, *points], np.float32) * np.float32(0.5 / FINENESS), 0
    for here in _nonzero(magnitudes):
        levels = magnitudes[here]
        values = offsets[np.minimum(levels, POINTS)]
        values += levels
        with np.errstate(over="ignore"):  # another sender's step may be near the largest number
            values *= np.float32(step)
        values *= np.where(negative[at : at + here.size], np.float32(-1), np.float32(1))
        yield here, values
        at += here.size


def _step(values: Sequence[Array], places: Sequence[Place], bits: float) -> float:
    """The step at which values of mean square 1 take `bits` each, found on a sample of them."""
    total = sum(value.size for value in values)
    sampled = [_sampled(value, place, max(1, total // SAMPLE)) for value, place in zip(values, places, strict=True)]
    parts, folds, kept = zip(*sampled, strict=True)
    flat = np.concatenate(parts)
    groups = kinds([np.abs(part) for part in parts], folds, kept)
    weights = np.repeat([v.size / max(1, p.size) for v, p in zip(values, parts, strict=True)], [p.size for p in parts])
    # the size of scale numbers does not depend on the step
    wanted = max(0.5 * bits * total, bits * total - NUMBER * sum(width(fold(place.entry.shape)) for place in places))

    def excess(power: float) -> float:
        """The logarithm of a step's size relative to the wanted size; it is nearly linear in the step's logarithm."""
        return math.log(max(1.0, entropy(_magnitudes(flat, 2.0**power), groups, weights)) / wanted)

    power = other = 1.5 - bits
    found = at_other = excess(power)
    while found * at_other > 0 and FINEST < power < COARSEST:
        other, at_other = power, found
        power += math.copysign(1, found)
        found = excess(power)
    for turn in range(TRIES):
        if abs(found) < CLOSE or found * at_other > 0:
            break
        between = other + (power - other) * (at_other / (at_other - found) if turn % 2 == 0 else 0.5)
        at = excess(between)
        if at * found < 0:
            other, at_other = power, found
        power, found = between, at
    return float(2.0**power)


def _sampled(values: Array, place: Place, every: int) -> tuple[Array, Shape, Array | None]:
    """The values of every `every`-th output channel (without channels: place), their shape, and which of its places
    hold one."""
    rows, columns, rest = fold(place.entry.shape)
    if rows == 1 and columns == 1 and place.kept is None:
        values = values[::every]
        return values, (1, 1, values.size), None
    if place.kept is None:
        values = values.reshape(rows, -1)[::every].reshape(-1)
        return values, (len(range(0, rows, every)), columns, rest), None
    whole = np.zeros(place.kept.size, np.float32)
    whole[place.kept] = values
    kept = place.kept.reshape(rows, -1)[::every].reshape(-1)
    return whole.reshape(rows, -1)[::every].reshape(-1)[kept], (len(range(0, rows, every)), columns, rest), kept
