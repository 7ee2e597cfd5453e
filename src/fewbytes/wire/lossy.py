"""Lossy coding of values: rounded to steps with a dead zone, then entropy-coded; what is lost is kept for later."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbytes.base.errors import FrameError
from fewbytes.base.rate import Rate
from fewbytes.base.state import State
from fewbytes.wire.layout import DTYPES, Entry, Place
from fewbytes.wire.levels import BLOCK, MOST, Shape, decode_levels, encode_levels, entropy, fold, kinds, width
from fewbytes.wire.sections import Array, Sink, Source
from fewbytes.wire.words import DIFFERENCE, ITSELF

ZERO, UP = 0.65, 0.4  # of a step: what is below ZERO is 0, and the rest n up to n + 1 - UP is n
POINTS = 3  # magnitudes told apart by where in their step values lie on the mean: 1, 2, and all from 3 on
FINENESS = 127  # of half a step: how exactly that is told
AHEAD = [51, 0, 0]  # what is told instead where means are taken and the rest is sent later: 1 is a fifth of a step more
SAMPLE = 1 << 16  # values looked at to find the step
FINEST, COARSEST = -14, 6  # what a step may be: powers of 2, of the root mean square of what is rounded
NUMBER = 3.0  # bits that a number takes that tells how large levels are
CLOSE, TRIES = 0.02, 12  # how near the wanted size of it is near enough, and steps tried at most to get there
TINY, FARTHEST = np.finfo(np.float32).tiny, float(np.finfo(np.float32).max)  # a step at least, and at most


@dataclass
class Lossy:
    """How the values of one message or reply are rounded, and what came of it.

    `exact`: names of tensors that are left alone, as all in fields marked EXACT are. `residual`: by the path of its
    field and its name, what earlier rounding of a tensor has lost, which is added to what is rounded now (error
    feedback: Seide et al. 2014); afterwards, what is lost by then; but of fields marked FRESH nothing. `averaged`:
    whether the receiver takes the mean of many such replies. `values`: how many were rounded, `left`: how many left
    alone; `energy` and `lost`: the squared norm of the former, and that of the error.
    """

    rate: Rate
    exact: Set[str] = frozenset()
    residual: dict[str, State] = field(default_factory=dict)
    averaged: bool = False
    values: int = 0
    left: int = 0
    energy: float = 0.0
    lost: float = 0.0

    @property
    def nmse(self) -> float:
        """The squared error over the squared norm of all that was rounded."""
        return self.lost / self.energy if self.energy else 0.0

    def bits_a_value(self, nbytes: int) -> float:
        """Bits for each value of a frame of so many bytes, of those left alone, too; 0 where nothing was rounded."""
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
    """Write the values, flat and of one type, that `lossy` does not spare; return their header: how each tensor
    travels, the step, where in it values lie, levels. None, and nothing is written, where there is nothing to round, or
    no finite number. `bases`: what the message holds there that they answer. `lasting`: whether what a tensor loses is
    kept for the next reply; of values that are made anew each time, such as prototypes, the last are what counts.
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
    peak = float(np.abs(flat).max(initial=0))
    if not flat.size or not math.isfinite(peak):
        return None
    energy = _energy(flat, peak)
    scale = np.float32(math.sqrt(energy / flat.size)) or np.float32(1)
    step = scale * np.float32(lossy.rate.step or _step([value / scale for value in wanted], here, lossy.rate.bits))
    step = np.float32(min(float(step), 0.99 * peak / ZERO, FARTHEST)) if peak else step  # so that something is sent
    step = max(step, np.float32(peak / (MOST - 1)), TINY)  # so that no value is beyond the levels
    if not step < math.inf:
        return None
    magnitudes = _magnitudes(flat, step)
    negative = flat[magnitudes > 0] < 0
    later = lossy.averaged and all(lasting(place.entry) for place in here)
    # of values that grow until they pass ZERO the mean is just there: sending it, all clients would lag the same way
    points = AHEAD if later else _points(flat, magnitudes, step)
    cuts = np.cumsum([value.size for value in wanted])[:-1]
    folds, kept = [fold(place.entry.shape) for place in here], [place.kept for place in here]
    header = encode_levels(sink, np.split(magnitudes, cuts), negative, folds, kept)
    flat -= _rounded(magnitudes, negative, step, points)
    lossy.values += flat.size
    lossy.energy, lossy.lost = lossy.energy + energy, lossy.lost + _energy(flat, peak)
    for place, missing in zip(here, np.split(flat, cuts), strict=True):
        if lasting(place.entry):
            lost = _left(place, missing, _lost(lossy, path, place.entry))
            lossy.residual.setdefault(path, {})[place.entry.name] = lost
    return [bytes(ways), float(step), points, header]


def rounded_values(
    source: Source, header: Any, places: Sequence[Place], bases: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Read what `round_values` wrote: flat tensors, None for each that was left alone. Raises FrameError."""
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
    if max(ways, default=0) > DIFFERENCE or not all(DTYPES[place.entry.dtype].is_floating_point for place in here):
        raise FrameError("type", "what is rounded are not numbers between others")
    magnitudes, negative = decode_levels(source, inner, [fold(p.entry.shape) for p in here], [p.kept for p in here])
    parts = iter(torch.from_numpy(_rounded(magnitudes, negative, step, points)).split([p.size for p in here]))
    out: list[Tensor | None] = []
    for place, way, base in zip(places, ways, bases, strict=True):
        value = next(parts).to(DTYPES[place.entry.dtype]) if way else None
        if value is not None and way == DIFFERENCE:
            if base is None:
                raise FrameError("base", "values are coded against a message this receiver does not hold: send in full")
            value = value + base
        out.append(value)
    return out


def _wanted(value: Tensor, base: Tensor | None) -> tuple[int, Tensor]:
    """How a tensor travels, and what of it is to be rounded: itself or, where that is smaller, its difference."""
    if base is not None:
        difference = value - base.float()
        peak = float(value.abs().max())
        if _energy(difference.numpy(), peak) <= _energy(value.numpy(), peak):
            return DIFFERENCE, difference
    return ITSELF, value


def _energy(values: Array, peak: float) -> float:
    """The squared norm of values of which none is far above the `peak`. By NumPy: PyTorch's depends on where in memory
    they lie."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = values / np.float32(peak or 1)
        return float(np.dot(scaled, scaled)) * peak**2


def _lost(lossy: Lossy, path: str, entry: Entry) -> Tensor | None:
    """What earlier rounding has lost of a tensor; None for nothing, and for one that had another shape then."""
    lost = lossy.residual.get(path, {}).get(entry.name)
    return None if lost is None or lost.shape != entry.shape else lost


def _at(values: Array, kept: Array | None) -> Array:
    return values if kept is None else values[kept]


def _left(place: Place, missing: Array, before: Tensor | None) -> Tensor:
    """What a tensor has lost by now: `missing`, and what was lost before where nothing was sent now."""
    lost = missing.copy()
    if place.kept is not None:
        lost = np.zeros(place.entry.size, np.float32) if before is None else before.reshape(-1).numpy().copy()
        lost[place.kept] = missing
    return torch.from_numpy(lost).view(place.entry.shape)


def _magnitudes(values: Array, step: Any) -> Array:
    """The level of each value without its sign, uint16; beyond the greatest there is none, and error feedback."""
    scaled = np.abs(values)
    scaled *= np.float32(1) / np.float32(step)
    zero = scaled < ZERO
    scaled += np.float32(UP)
    np.minimum(scaled, MOST, out=scaled)
    levels = scaled.astype(np.uint16)
    levels[zero] = 0
    return levels


def _points(values: Array, magnitudes: Array, step: Any) -> list[int]:
    """Where in their steps the values of each of POINTS magnitudes lie on the mean, in parts of half a step."""
    points = []
    for n in range(1, POINTS + 1):
        chosen = magnitudes == n if n < POINTS else magnitudes >= n
        inside = np.abs(values[chosen]).astype(np.float64) / float(step) - magnitudes[chosen]
        points.append(int(np.clip(np.rint(2 * FINENESS * inside.mean()), -FINENESS, FINENESS)) if inside.size else 0)
    return points


def _rounded(magnitudes: Array, negative: Array, step: Any, points: Sequence[int]) -> Array:
    """What levels stand for, float32."""
    offsets = np.array([0, *points], np.float32) * np.float32(0.5 / FINENESS)
    out, at = np.empty(magnitudes.size, np.float32), 0
    for start in range(0, magnitudes.size, BLOCK):
        here, where = magnitudes[start : start + BLOCK], out[start : start + BLOCK]
        nonzero = np.flatnonzero(here)
        np.take(offsets, np.minimum(here, POINTS), out=where)
        where += here
        where *= np.float32(step)
        flipped = nonzero[negative[at : at + nonzero.size]]
        where[flipped] = -where[flipped]
        at += nonzero.size
    return out


def _step(values: Sequence[Array], places: Sequence[Place], bits: float) -> float:
    """The step at which values whose mean square is 1 take so many bits each, found on a sample of them."""
    total = sum(value.size for value in values)
    sampled = [_sampled(value, place, max(1, total // SAMPLE)) for value, place in zip(values, places, strict=True)]
    parts, folds, kept = zip(*sampled, strict=True)
    flat = np.concatenate(parts)
    groups = kinds([np.abs(part) for part in parts], folds, kept)
    weights = np.repeat([v.size / max(1, p.size) for v, p in zip(values, parts, strict=True)], [p.size for p in parts])
    # what tells how large levels are does not depend on the step
    wanted = max(0.5 * bits * total, bits * total - NUMBER * sum(width(fold(place.entry.shape)) for place in places))

    def excess(power: float) -> float:
        """How many times what is wanted a step takes, as a logarithm, which is nearly linear in that of the step."""
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
    """Of every so manyth output channel (of a tensor without channels: place) the values, their layout, and which of
    its places hold one."""
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
