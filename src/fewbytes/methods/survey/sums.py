"""Totals: what sites that tell no figures add to a survey, in a sum that hides them among at least three of their kind.

The server sends a plan: the columns, each with a centre and a scale and the edges of cells, or with its categories. A
site replies with one vector of counts and sums over its samples, in the plan's order. It leaves the site only under
secure aggregation (`fewbytes.methods.parts.secure`), so that the server learns the sum over all of these sites. Only
sites that tell equally little are summed up together: subtracting what one reports would reveal the others'.

Bytes per client, before lossless coding: 4 V up for V entries of the vector, besides those of secure aggregation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fewbytes.base.errors import MethodError
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.promises import Promises
from fewbytes.core.site import Site
from fewbytes.data.surveyed import Column, Figures, SiteTerms, Surveyed
from fewbytes.methods.parts.secure import SecureAggregation
from fewbytes.methods.survey.figures import CELLS, MEASURED, MOST_NAMED, ColumnFigures, merged, shown
from fewbytes.wire import Dense, payload

FAR = 32.0
"""In scales, the distance from the centre beyond which values are taken as that far."""
LIMB = 1 << 12
"""Whole numbers travel as digits to this base, so that sums are exact up to some hundred sites of 2^24 rows."""
FINE = 1 << 12
"""Sums of values travel in units of 1 / FINE scales."""


@payload
class PlannedColumn:
    """A column that sites sum up. `edges`: the number of its edges among the plan's; none for categories."""

    name: str
    kind: str
    centre: float
    scale: float
    edges: int
    texts: list[str]


@payload
class Plan:
    """The columns that sites of one `tells` sum up, and the edges of their cells, column after column."""

    tells: str
    columns: list[PlannedColumn]
    edges: torch.Tensor  # float64

    def each(self) -> Iterator[tuple[PlannedColumn, NDArray[np.float64]]]:
        """The columns with their edges. Raises MethodError for a plan that no survey makes."""
        counts = [column.edges for column in self.columns]
        few = all(0 <= count < CELLS for count in counts) and all(len(c.texts) <= MOST_NAMED for c in self.columns)
        if not few or sum(counts) != len(self.edges) or not all(column.scale > 0 for column in self.columns):
            raise MethodError("the server's plan of a survey does not add up")
        edges = self.edges.double().numpy()
        yield from zip(self.columns, np.split(edges, np.cumsum(counts))[: len(counts)], strict=True)


@payload
class Added:
    """A site's vectors, in the plan's order, as digits to the base LIMB: `counts` of rows; `moments`, the sums of
    values and of their squares."""

    sums: Dense


@dataclass(frozen=True)
class Totals(Method):
    """Part of a survey; it has no settings of its own."""

    promises = Promises(sends="sums over its samples", sums=True)

    def round(self, state: None, net: Network, t: int) -> None:
        """Nothing: the survey's server half calls `add`."""

    def add(self, state: None, message: Plan, site: Site) -> Added:
        """The site's vector; zeros if it has too few samples."""
        about, terms = described_at(site)
        if terms.tell == "figures" or terms.tell != message.tells:
            raise MethodError(f"this site reports its {terms.tell}: it takes part only in sums of such sites")
        if site.problem.privacy is not None:
            raise MethodError("sums have no noise, which this survey promises")
        summed = [_summed(about.columns.get(column.name), column, edges) for column, edges in message.each()]
        counts = np.concatenate([[float(about.rows)], *(each for each, _ in summed)])
        moments = np.concatenate([np.zeros(0), *(each for _, each in summed)])
        if about.rows < terms.min_count:
            counts, moments = np.zeros_like(counts), np.zeros_like(moments)
        return Added(Dense({**_digits("counts", counts, 2), **_digits("moments", moments * FINE, 3)}))


def _digits(name: str, values: NDArray[np.float64], count: int) -> dict[str, torch.Tensor]:
    """The digits of rounded values, the lowest first; the last one has the sign."""
    rest, found = np.round(values).astype(np.int64), {}
    for i in range(count):
        found[f"{name} {i}"] = torch.from_numpy(rest % LIMB if i < count - 1 else rest).float()
        rest = rest // LIMB
    return found


def added_up(means: Mapping[str, torch.Tensor], sites: int) -> dict[str, torch.Tensor]:
    """The sums of the vectors, `counts` and `moments`, float64, from the means of their digits over some sites."""
    found: dict[str, torch.Tensor] = {}
    for key, mean in means.items():
        name, _, i = key.partition(" ")
        found[name] = found.get(name, 0) + (mean.double() * sites).round() * float(LIMB ** int(i))
    found["moments"] = found["moments"] / FINE
    return found


def described_at(site: Site) -> tuple[Figures, SiteTerms]:
    """All samples of a site, and its terms. Raises MethodError for a site whose data are not read for a survey."""
    if not isinstance(site.train, Surveyed) or not isinstance(site.test, Surveyed):
        raise MethodError("a survey needs data that are read for it (`fewbytes survey`)")
    rows = [np.arange(len(part.y)) if part.rows is None else part.rows for part in (site.train, site.test)]
    return site.train.about.take(np.concatenate(rows)), site.train.terms


def _summed(
    column: Column | None, wanted: PlannedColumn, edges: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A column's parts of the vectors: rows, missing ones and those of each cell, or of each category and all others;
    and of numbers the sums of values and of squares. Zeros for another kind of column."""
    measured = wanted.kind in MEASURED
    if column is None or column.kind != wanted.kind:
        return np.zeros(2 + (1 + len(edges) if measured else len(wanted.texts) + 1)), np.zeros(2 * measured)
    values = column.values[~np.isnan(column.values)]
    rows = [float(len(column.values)), float(len(column.values) - len(values))]
    if not measured:
        number = {text: i for i, text in enumerate(wanted.texts)}
        codes = np.array([number.get(text, len(number)) for text in column.texts], np.int64)[values.astype(np.int64)]
        return np.concatenate([rows, np.bincount(codes, minlength=len(number) + 1)]), np.zeros(0)
    z = np.clip((values - wanted.centre) / wanted.scale, -FAR, FAR)
    found = np.bincount(np.searchsorted(edges, values, side="left"), minlength=len(edges) + 1)
    return np.concatenate([rows, found]), np.array([z.sum(), (z**2).sum() / FAR])


def plan_of(tells: str, columns: Mapping[str, ColumnFigures]) -> Plan:
    """The plan of these columns, as far as they can be summed up, for sites of one `tells`."""
    planned, edges = [], list[float]()
    for name, of in columns.items():
        if of.kind in MEASURED and of.mean is not None:
            planned.append(PlannedColumn(name, of.kind, of.mean, of.deviation or 1.0, len(of.edges), []))
            edges += of.edges
        elif of.kind == "categories":
            texts = sorted(of.categories, key=lambda text: -of.categories[text])[:MOST_NAMED]
            planned.append(PlannedColumn(name, of.kind, 0.0, 1.0, 0, sorted(texts)))
    return Plan(tells, planned, torch.tensor(edges, dtype=torch.float64))


def read_sums(plan: Plan, sums: Mapping[str, torch.Tensor], least: int) -> tuple[int, dict[str, ColumnFigures]]:
    """(number of samples, figures by column) from the sums of the sites' vectors; none of fewer than `least`."""
    counts = sums["counts"].long().tolist()
    moments = sums["moments"].tolist()
    at, to, found = 1, 0, dict[str, ColumnFigures]()
    for column, edges in plan.each():
        rows, missing = counts[at : at + 2]
        known, at = rows - missing, at + 2
        figures = ColumnFigures(column.kind, rows, None if 0 < missing < least or known < least else missing)
        if column.kind in MEASURED:
            total, squares = moments[to : to + 2]
            of_cells = counts[at : at + len(edges) + 1]
            at, to = at + len(edges) + 1, to + 2
            if known >= least:
                mean = total / known
                figures.mean = column.centre + column.scale * mean
                figures.deviation = column.scale * float(np.sqrt(max(0.0, squares * FAR / known - mean**2)))
                figures.edges, figures.counts = merged(edges.tolist(), of_cells, least)
        else:
            of_texts = counts[at : at + len(column.texts) + 1]
            at += len(column.texts) + 1
            named = {text: count for text, count in zip(column.texts, of_texts, strict=False) if count}
            figures.categories, figures.other = shown(named, least, of_texts[-1])
        if rows >= least:
            found[column.name] = figures
    return counts[0], found


TOTALS = SecureAggregation(Totals(), 2.0 * LIMB)
"""The sums of a survey, hidden from its server."""
