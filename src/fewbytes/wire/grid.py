"""A grid: rounded differences on it add up exactly, so that those of several messages can be sent as one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fewbytes.base.state import State

GRID_TYPES = (torch.float32, torch.float64)
"""Types with enough digits for a grid."""
DIGITS = 24  # of a float32: its integers up to 2^24 are exact, and so are multiples of a grid's unit
GROWTH = 4  # powers of two that values may grow by before they leave a grid
APART = 2.0**14  # a tensor with a value so many times the others' root mean square makes their grid too coarse
LEAST_OTHERS = 0.01  # of all values, that these others are


@dataclass
class Grid:
    """Where differences are rounded to multiples of steps that are powers of two, at least `unit`.

    Values that are multiples of `unit`, and below 2^24 of them, stay so, and differences of several messages add up
    exactly: their sum can be sent as one message. `step`: the step of all values (0: by the rate, to the nearest power
    of two). `carry`: by path, the logarithm of earlier steps that this rounding left out, which moves the next step.
    `finest`: the smallest step used (0: none).
    """

    unit: float
    step: float = 0.0
    carry: dict[str, float] = field(default_factory=dict)
    finest: float = 0.0

    def choose(self, path: str, wanted: float, most: float) -> float:
        """The step to use in place of the `wanted` one, if possible at most `most`."""
        if not self.step:
            power = math.log2(wanted) + self.carry.get(path, 0.0)
            exponent = max(min(round(power), math.floor(math.log2(most))), math.log2(self.unit))
            self.carry[path] = max(-1.0, min(1.0, power - exponent))
        step = self.step or 2.0**exponent
        self.finest = min(self.finest or step, step)
        return step


def unit_of(tensors: Iterable[Tensor]) -> float:
    """The unit of a grid for these values, and for values up to 16 times as large."""
    peaks = [float(t.abs().max()) for t in tensors if t.dtype in GRID_TYPES and t.numel()]
    peak = max((p for p in peaks if math.isfinite(p)), default=0.0)
    return 2.0 ** (math.frexp(peak or 1.0)[1] + GROWTH - DIGITS)


def outlying(state: State) -> frozenset[str]:
    """The names of tensors that cannot share a grid with the others, such as masks of -1e9 and large constants."""
    grid = {name: t.double() for name, t in state.items() if t.dtype in GRID_TYPES and t.numel()}
    peaks = {name: float(t.abs().max()) for name, t in grid.items()}
    names = sorted((name for name in grid if math.isfinite(peaks[name])), key=lambda name: -peaks[name])
    energy, counts = {name: float(grid[name].square().sum()) for name in names}, {n: grid[n].numel() for n in names}
    for i, name in enumerate(names):
        rest, count = sum(energy[n] for n in names[i + 1 :]), sum(counts[n] for n in names[i + 1 :])
        enough = rest > 0 and count >= LEAST_OTHERS * sum(counts.values())
        if not enough or peaks[name] <= APART * math.sqrt(rest / count):
            return frozenset(names[:i])
    return frozenset()


def snapped(state: State, unit: float, exact: Set[str] = frozenset()) -> State:
    """The multiples of `unit` nearest to the values; values of other types and `exact` tensors stay."""
    rounded = {name for name, t in state.items() if t.dtype in GRID_TYPES and name not in exact}
    return {name: (t / unit).round() * unit if name in rounded else t for name, t in state.items()}
