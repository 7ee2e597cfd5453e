"""Figures that describe a site's column, none of fewer samples than a minimum; and their sums over sites.

Numbers have an exact mean and deviation, and cells: at most CELLS ranges with the number of values in each, the outer
ones open. Cells hold about equally many values; their edges are rounded, and none is a person's value. A quantile read
from them is exact to the samples of one cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from fewbytes.data.surveyed import Column

CELLS = 64
"""Maximum number of cells of a column."""
DIGITS = 3
"""Edges are rounded to this many digits of a deviation."""
SMALLEST = 1e-200
"""The smallest deviation by which edges are rounded."""
MOST_NAMED = 200
"""Maximum number of categories that are named, the most frequent ones."""
SURELY = 7.1
"""With noise, its standard deviations above which a category is named: noise alone is above them once in 10^12."""
MEASURED = ("numbers", "dates")
"""The kinds of columns with means and cells."""


class ColumnFigures(msgspec.Struct):
    """A column at a site, or of several. `rows`: with a value or without; `missing`: without (None: fewer than the
    minimum, but some; all other figures then count them as if they had a value). `edges` and `counts`: of the cells;
    cell i holds values above edge i - 1, up to edge i. `other`: rows of categories that are not named (None: fewer than
    the minimum). `why`: why a column is unreadable. `noise`: the standard deviation of the noise in each number of
    samples."""

    kind: str
    rows: int
    missing: int | None = 0
    mean: float | None = None
    deviation: float | None = None
    edges: list[float] = []
    counts: list[int] = []
    categories: dict[str, int] = {}
    other: int | None = 0
    why: str = ""
    noise: float = 0.0

    @property
    def known(self) -> int:
        """The number of rows with a value."""
        return self.rows - (self.missing or 0)

    def quantile(self, share: float) -> float | None:
        """The value below which this share of the values lies, by the cells; in the open ones, their edge."""
        if not self.edges:
            return None if self.mean is None or self.deviation else self.mean
        below = np.cumsum(self.counts)[:-1] / sum(self.counts)
        return float(np.interp(share, below, self.edges))

    @property
    def mean_error(self) -> float:
        """How far noise in the numbers of its cells may move the mean: its standard deviation, and half of the cells'
        widths, within which the mean of their values is not known. The outer ones count as wide as all others."""
        if not self.noise or self.mean is None:
            return 0.0
        if len(self.edges) < 2:
            return math.inf
        edges, shares = np.array(self.edges), np.array(self.counts) / max(1, sum(self.counts))
        widths = np.array([edges[-1] - edges[0], *np.diff(edges), edges[-1] - edges[0]])
        drawn = self.noise * float(np.sqrt((((edges[:-1] + edges[1:]) / 2 - self.mean) ** 2).sum()))
        return math.hypot(drawn / max(1, self.known), float((shares * widths).sum()) / 2)

    @property
    def share_error(self) -> float:
        """The standard deviation, by noise, of the share of samples in half of the cells or categories."""
        cells = max(1, len(self.counts), len(self.categories))
        return self.noise * math.sqrt(cells / 2) / max(1, self.known)

    @property
    def rank_error(self) -> float:
        """The largest share of values in one cell: how far a quantile's share may be off."""
        return max(self.counts, default=0) / max(1, sum(self.counts))


def describe(column: Column, least: int) -> ColumnFigures:
    """The figures of a site's column, none of fewer than `least` samples."""
    values = column.values[~np.isnan(column.values)]
    rows, missing = len(column.values), len(column.values) - len(values)
    figures = ColumnFigures(column.kind, rows, missing, why=column.why)
    if 0 < missing < least:
        figures.missing = None
    if len(values) < least:
        figures.missing = missing if not len(values) else None
        return figures
    if column.kind in MEASURED:
        figures.mean, figures.deviation = float(values.mean()), float(values.std())
        figures.edges, counts = cells(values, least)
        figures.counts = counts if figures.missing is not None else scaled(counts, rows)
    elif column.kind == "categories":
        counted = np.bincount(values.astype(np.int64), minlength=len(column.texts)).tolist()
        named = {text: count for text, count in zip(column.texts, counted, strict=True) if count}
        figures.categories, figures.other = shown(named, least, 0 if figures.missing is not None else missing)
    return figures


def cells(values: NDArray[np.float64], least: int) -> tuple[list[float], list[int]]:
    """(edges, counts) of about equally full cells, each of `least` values or more."""
    ordered, each = np.sort(values), max(least, math.ceil(len(values) / CELLS))
    unit = rounding(float(values.std()), float(values[0]))
    cuts = np.ceil(ordered[each - 1 :: each] / unit) * unit
    digits = max(0, -math.floor(math.log10(unit)))
    edges = between(np.unique(np.round(cuts, digits)), np.unique(ordered), digits + 1)
    counts = np.diff([0, *np.searchsorted(ordered, edges, side="right"), len(ordered)])
    return merged(edges.tolist(), counts.tolist(), least)


def between(edges: NDArray[np.float64], values: NDArray[np.float64], digits: int) -> NDArray[np.float64]:
    """The edges, each of those that is one of the `values` (ascending, distinct) moved half-way to the next value, with
    so many decimal digits; without those that remain one."""
    after = values[np.minimum(np.searchsorted(values, edges, side="right"), len(values) - 1)]
    moved = np.where(np.isin(edges, values), np.round((edges + after) / 2, digits), edges)
    return np.unique(moved[~np.isin(moved, values)])


def rounding(deviation: float, value: float) -> float:
    """The power of ten to which edges of cells are rounded; `value`: one of them, if all are equal."""
    size = max(deviation or abs(value) or 1.0, SMALLEST)
    return float(10.0 ** (math.floor(math.log10(size)) - DIGITS + 1))


def merged(edges: Sequence[float], counts: Sequence[int], least: int) -> tuple[list[float], list[int]]:
    """The cells, neighbours together where one has fewer than `least` values."""
    kept: list[float] = []
    sums: list[int] = []
    open_ = 0
    for edge, count in zip(edges, counts, strict=False):
        open_ += count
        if open_ >= max(1, least):
            kept.append(edge)
            sums.append(open_)
            open_ = 0
    last = open_ + counts[-1]
    if last < max(1, least) and kept:
        kept.pop()
        last += sums.pop()
    return kept, [*sums, last]


def scaled(counts: Sequence[int], total: int) -> list[int]:
    """Counts in the same proportions that add up to `total`."""
    upper = np.round(np.cumsum(counts) * (total / max(1, sum(counts)))).astype(int).tolist()
    return [b - a for a, b in pairwise([0, *upper])]


def shown(named: Mapping[str, int], least: int, more: int = 0) -> tuple[dict[str, int], int | None]:
    """(categories with their counts, the sum of the others), neither of fewer than `least`. Fewer others are counted
    with the largest category, or their number would follow from the sum. `more`: further rows of no named category."""
    ordered = sorted(named.items(), key=lambda item: (-item[1], item[0]))
    kept = dict(each for each in ordered[:MOST_NAMED] if each[1] >= least)
    hidden = sum(named.values()) - sum(kept.values()) + more
    if 0 < hidden < least and kept:
        kept[ordered[0][0]] += hidden
    return dict(sorted(kept.items())), hidden if hidden >= least or not hidden else None


# Several sites --------------------------------------------------------------------------------------------------------


def pooled(sites: Iterable[ColumnFigures]) -> ColumnFigures:
    """The figures of several sites' column together: exact for counts, means and deviations; for cells up to the
    samples of one cell of each. Sites with another kind of column than most rows have are left out."""
    every = list(sites)
    found = [each for each in every if each.kind not in ("unreadable", "identifiers")]
    if not found:
        return ColumnFigures(every[0].kind if every else "unreadable", sum(each.rows for each in every))
    rows = {kind: sum(each.rows for each in found if each.kind == kind) for kind in {each.kind for each in found}}
    kind = max(sorted(rows), key=lambda kind: rows[kind])
    found = [each for each in found if each.kind == kind]
    lacking = [each.missing for each in found]
    reported = sum(each or 0 for each in lacking)
    figures = ColumnFigures(kind, rows[kind], reported if reported or None not in lacking else None)
    figures.noise = math.sqrt(sum(each.noise**2 for each in found))
    if kind == "categories":
        for each in found:
            for text, count in each.categories.items():
                figures.categories[text] = figures.categories.get(text, 0) + count
        others = [each.other for each in found]
        hidden = sum(each or 0 for each in others)
        figures.other = hidden if hidden or None not in others else None
    if measured := [each for each in found if each.mean is not None]:
        weights = np.array([each.known for each in measured], np.float64)
        means = np.array([each.mean for each in measured], np.float64)
        deviations = np.array([each.deviation for each in measured], np.float64)
        mean = float(weights @ means / weights.sum())
        figures.mean = mean
        figures.deviation = float(np.sqrt(weights @ (deviations**2 + (means - mean) ** 2) / weights.sum()))
        figures.edges, figures.counts = together(measured)
    return figures


def together(sites: Sequence[ColumnFigures]) -> tuple[list[float], list[int]]:
    """The cells of several sites' column together, at most CELLS of the sites' edges."""
    edges = np.unique([edge for each in sites for edge in each.edges])
    if not len(edges):
        return [], [sum(sum(each.counts) for each in sites)]
    if len(sites) == 1:
        return list(sites[0].edges), list(sites[0].counts)
    below = sum((_below(each, edges) for each in sites), np.zeros(len(edges)))
    total = sum(sum(each.counts) for each in sites)
    wanted = np.searchsorted(below, np.arange(1, CELLS) * total / CELLS)
    chosen = np.unique(np.minimum(wanted, len(edges) - 1)) if len(edges) >= CELLS else np.arange(len(edges))
    upper = np.round(below[chosen]).astype(int).tolist()
    return edges[chosen].tolist(), [b - a for a, b in pairwise([0, *upper, total])]


def _below(site: ColumnFigures, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """About how many of a site's values lie up to each of these edges; open cells are taken as a deviation wide."""
    width, total = site.deviation or 1.0, sum(site.counts)
    if not site.edges:
        return np.where(edges >= (site.mean or 0.0), float(total), 0.0)
    at = [site.edges[0] - width, *site.edges, site.edges[-1] + width]
    below: NDArray[np.float64] = np.interp(edges, at, [0, *np.cumsum(site.counts)])
    return below


def pooled_columns(sites: Sequence[Mapping[str, ColumnFigures]]) -> dict[str, ColumnFigures]:
    """The figures of several sites together, by column in order of first appearance."""
    names = dict.fromkeys(name for each in sites for name in each)
    return {name: pooled(each[name] for each in sites if name in each) for name in names}
