"""Figures of a site under differential privacy: every one follows from numbers of samples in fixed cells, with noise.

A sample is in one cell of each column, or among its missing values. So one more sample changes all these numbers
together by at most the root of the number of columns plus one, to which Gaussian noise is fitted (`Site.noisy`). Cells
of numbers are the same everywhere: eight for each power of ten, of either sign. Means and deviations are those of the
cells' middles, without cells of so few samples that noise alone may have put them there. A category is named only if
its number is so large that a single sample reaches it once in 10^12 surveys. The names and kinds of columns have no
noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from fewbytes.core.site import Site
from fewbytes.data.surveyed import Column
from fewbytes.methods.survey.figures import CELLS, MEASURED, SURELY, ColumnFigures

PER_TEN, LEAST_POWER, MOST_POWER = 8, -3, 6
"""Edges of cells for each power of ten, and the smallest and the largest power."""
LIKELY = 4.0
"""Deviations of the noise above which a cell counts: noise alone is above them once in 30,000."""


def fixed_edges() -> NDArray[np.float64]:
    """The edges of all cells, ascending."""
    above = 10.0 ** (np.arange(LEAST_POWER * PER_TEN, MOST_POWER * PER_TEN + 1) / PER_TEN)
    return np.concatenate([-above[::-1], [0.0], above])


EDGES = fixed_edges()


def noisy_figures(
    site: Site, columns: Mapping[str, Column], rows: int, least: int
) -> tuple[int | None, dict[str, ColumnFigures]]:
    """(number of samples, figures by column), all with the noise that the run promises; none of fewer than `least`."""
    parts = {name: _counts(column) for name, column in columns.items()}
    exact = np.concatenate([[float(rows)], *parts.values()])
    norm = math.sqrt(len(parts) + 1)
    noisy, deviation = site.noisy(torch.from_numpy(exact), norm)
    found, at = dict[str, ColumnFigures](), 1
    values = noisy.numpy()
    samples = round(float(values[0]))
    if samples < least:
        return None, {}
    for name, exact_part in parts.items():
        part = values[at : at + len(exact_part)]
        at += len(exact_part)
        found[name] = _figures(columns[name], samples, part, deviation, least)
    return samples, found


def _counts(column: Column) -> NDArray[np.float64]:
    """Numbers of samples: without a value, and in each cell or category."""
    known = column.values[~np.isnan(column.values)]
    missing = [float(len(column.values) - len(known))]
    if column.kind in MEASURED:
        cells = np.bincount(np.searchsorted(EDGES, known, side="left"), minlength=len(EDGES) + 1)
    elif column.kind == "categories":
        cells = np.bincount(known.astype(np.int64), minlength=len(column.texts))
    else:
        cells = np.array([len(known)])
    return np.concatenate([missing, cells])


def _figures(column: Column, rows: int, noisy: NDArray[np.float64], deviation: float, least: int) -> ColumnFigures:
    """The figures of one column from its noisy numbers."""
    whole = np.round(noisy).astype(np.int64)
    missing = int(whole[0]) if least <= whole[0] <= rows and noisy[0] > LIKELY * deviation else 0
    figures = ColumnFigures(column.kind, rows, missing, why=column.why, noise=deviation)
    if column.kind in MEASURED:
        counted = np.where((noisy[1:] > LIKELY * deviation) & (whole[1:] >= least), whole[1:], 0)
        _measure(figures, counted)
    elif column.kind == "categories":
        sure = max(float(least), 1 + SURELY * deviation)
        figures.categories = {
            text: int(n) for text, n, exact in zip(column.texts, whole[1:], noisy[1:], strict=True) if exact >= sure
        }
        rest = rows - missing - sum(figures.categories.values())
        figures.other = rest if rest >= least else None
    return figures


def _measure(figures: ColumnFigures, counted: NDArray[np.int64]) -> None:
    """Set mean, deviation and cells from the counts of the fixed cells; nothing if all are empty."""
    inner = counted[1:-1]  # the open cells have no middle
    there = np.flatnonzero(inner)
    if not len(there):
        return
    first, last = int(there[0]), int(there[-1])
    if last - first + 1 > CELLS - 2:
        last = first + CELLS - 3
    counts, edges = inner[first : last + 1], EDGES[first : last + 2]
    middles = (edges[:-1] + edges[1:]) / 2
    total = counts.sum()
    figures.mean = float(counts @ middles / total)
    figures.deviation = float(np.sqrt(counts @ (middles - figures.mean) ** 2 / total))
    figures.edges, figures.counts = edges.tolist(), [0, *counts.tolist(), 0]
