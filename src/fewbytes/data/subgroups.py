"""Subgroups of a table's rows by one of its columns, which need not be a feature."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from math import isfinite
from typing import Literal, NamedTuple, Self

import numpy as np

from fewbytes.base.errors import UserError
from fewbytes.data.datasets import find
from fewbytes.data.frames import Table
from fewbytes.data.schema import Schema, no_column
from fewbytes.data.split import Split
from fewbytes.data.table_files import read_columns, table_files
from fewbytes.data.tables import used_rows

FEW = 8  # numbers with at most this many values are groups of their own
PARTS = 4  # else they are cut into this many groups, of about equal size over all sites
MISSING = "missing"


class By(NamedTuple):
    """A column of subgroups, and the `limits` between groups of its numbers, ascending; none: by the values.

    >>> from fewbytes.data.subgroups import By
    >>> By.read("age=50,70"), By.read("sex")
    (By(column='age', limits=(50.0, 70.0)), By(column='sex', limits=()))
    """

    column: str
    limits: tuple[float, ...] = ()

    @classmethod
    def read(cls, text: str) -> Self:
        """From `COLUMN` or `COLUMN=50,70`."""
        column, _, limits = text.rpartition("=")
        with suppress(ValueError):  # a column may be called so
            numbers = sorted({float(each) for each in limits.split(",")})
            if column and all(map(isfinite, numbers)):
                return cls(column, tuple(numbers))
        return cls(text)

    def shared(self, values: Sequence[str | float | None]) -> bool:
        """Whether the groups of a site's values are those of other sites: without limits, many numbers are cut by the
        values themselves."""
        return bool(self.limits) or len({each for each in values if isinstance(each, float)}) <= FEW


def column_values(
    name: str, schema: Schema, column: str, split: Literal["train", "test"], samples: Split
) -> list[str | float | None]:
    """A column's value for each of some samples of the table called `name`, of its training or test split, read by
    `schema`: text, or a number; None if it is missing.

    Raises UserError if the data are not a table, the table lacks the column, or it has other rows than `samples`.
    """
    place = find(name)
    files = {} if place is None else table_files(place, only_test=True)
    if not files:
        raise UserError(f"{name} is not a table, so it has no column {column!r}: leave --by out")
    table = read_columns(files.get(split, next(iter(files.values()))), schema)
    if column not in table.names:
        raise no_column(table.where, column, [*table.names], "name one that every site has (--by)")
    used = np.flatnonzero(used_rows(table, schema))
    if len(used) != len(samples.y):
        raise UserError(f"{table.where} has {len(used)} rows, and had {len(samples.y)}: restore it")
    values = _values(table, column)
    return [values[row] for row in (used if samples.rows is None else used[samples.rows])]


def _values(table: Table, column: str) -> list[str | float | None]:
    if table.kind(column) in ("numbers", "dates"):
        return [None if np.isnan(value) else float(value) for value in table.numbers(column)]
    codes, texts = table.categories(column)
    return [None if code < 0 else texts[code] for code in codes]


def groups_of(values: Sequence[str | float | None], limits: Sequence[float] = ()) -> tuple[list[str], list[str]]:
    """The names of groups in order, and the name of each value's group: texts and a few numbers as they are, other
    numbers between the limits, or in quarters. Texts have no limits.

    >>> from fewbytes.data.subgroups import groups_of
    >>> groups_of(["f", "m", None])
    (['f', 'm', 'missing'], ['f', 'm', 'missing'])
    >>> groups_of([float(age) for age in range(1, 9)] + [70.0])[0]
    ['up to 3', 'above 3 to 5', 'above 5 to 7', 'above 7']
    """
    texts = sorted({value for value in values if isinstance(value, str)})
    numbers = np.array([value for value in values if isinstance(value, float)])
    different = np.unique(numbers)
    if texts or (len(different) <= FEW and not limits):
        names = [*texts, *(f"{value:g}" for value in different)]
        each = [MISSING if v is None else f"{v:g}" if isinstance(v, float) else v for v in values]
    else:
        cuts = np.array(limits) if limits else np.unique(np.quantile(numbers, np.arange(1, PARTS) / PARTS))
        names = [f"up to {cuts[0]:g}", *(f"above {a:g} to {b:g}" for a, b in pairwise(cuts)), f"above {cuts[-1]:g}"]
        each = [MISSING if v is None else names[int(np.searchsorted(cuts, float(v)))] for v in values]
    return [*names, *([MISSING] if MISSING in each else [])], each
