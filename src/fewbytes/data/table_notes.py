"""What a data set's notes say of its tables: columns, rows and missing values, and columns whose units may differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fewbytes.base.errors import listed
from fewbytes.data.columns import is_number
from fewbytes.data.frames import Table
from fewbytes.data.schema import COLUMNS, DOUBT, Schema

MANY = 50  # number of categories of a column above which a note reports it
FAR = 5  # distance of a column's mean from the server's, in standard deviations, above which a note reports it
SOME = 10  # values, of which a deviation says something


def doubts(table: Table, schema: Schema) -> list[str]:
    """A line for each column that is empty here, or differs so much from the schema's table that its units may: a mean
    or a deviation far above the table's, or values that hardly differ, far from the table's mean."""
    found = []
    for name in dict.fromkeys((*schema.numbers, *schema.categories)):
        if table.missing(name).all():
            found.append(
                f"{DOUBT} column {name!r}: it is empty here, and the schema has values of it; is it named otherwise?"
            )
    for name, (mean, deviation) in schema.numbers.items():
        values = (table.numbers(name) - mean) / deviation
        values = values[~np.isnan(values)]
        if not len(values):
            continue
        near, spread = float(values.mean()), float(values.std())
        narrow = len(values) >= SOME and 0 < spread < 1 / (2 * FAR) and abs(near) > 2
        if max(abs(near), spread / 2) > FAR or narrow:
            own = f"mean {near * deviation + mean:.4g}, standard deviation {spread * deviation:.3g}"
            theirs = f"in the server's table {mean:.4g} and {deviation:.3g}"
            found.append(f"{DOUBT} column {name!r}: {own}, {theirs}; are the units the same?")
    return found


def table_note(
    name: str, table: Table, schema: Schema, kept: NDArray[np.bool_], counts: dict[str, int], more: Sequence[str]
) -> str:
    """A line about a table of the dataset `name`: columns, rows, and the numbers of missing values."""
    used = [name for name in schema.numbers if name not in schema.target]
    found = f"{len(used)} of numbers, {len(schema.categories)} of categories"
    parts = [f"{len(table):,} rows, {len(used) + len(schema.categories):,} columns used ({found})", *table.notes, *more]
    parts += [f"a decimal comma in {listed([*map(repr, table.commas)], COLUMNS)}"] if table.commas else []
    parts += (
        [f"commas between thousands in {listed([*map(repr, table.thousands)], COLUMNS)}"] if table.thousands else []
    )
    parts += [f"{listed([*map(str, marks)])} far from all others in {name!r}" for name, marks in table.far.items()]
    taken = {"half": "half of it", "value": "the limit", "missing": "missing"}.get(schema.limits)
    parts += [f"{count} limits taken as {taken} in {name!r}" for name, count in table.limits.items()]
    parts += [f"days since 1970 of {listed([*map(repr, schema.dates)], COLUMNS)}"] if schema.dates else []
    parts += [text for name, texts in schema.categories.items() if (text := _category_note(table, name, texts))]
    if counts:
        how = (
            f"{int((~kept).sum()):,} rows left out" if schema.missing == "drop" else "the column's mean, or no category"
        )
        most = sorted(counts.items(), key=lambda item: -item[1])
        where = listed([f"{count:,} in {column!r}" for column, count in most], COLUMNS)
        parts.append(f"{sum(counts.values()):,} values missing ({how}): {where}")
    else:
        parts.append("no value missing")
    return f"{of_file(name, table)}{'; '.join(parts)}; learnt: {listed(schema.target, COLUMNS)} ({schema.learns})"


def of_file(name: str, table: Table) -> str:
    """The beginning of a note: the table's file, unless the dataset `name`, which notes follow, says it."""
    file = Path(table.where).name
    return "" if file == Path(name).name else f"{file}: "


def _category_note(table: Table, name: str, texts: Sequence[str]) -> str:
    """A note on a column of categories if they are many, or if some look like numbers."""
    numbers = sum(map(is_number, texts))
    seem = table.texts(name).seem if table.stored(name) in ("texts", "categories") else ""
    more = f", which seem to be {seem}" if seem else f", {numbers} of them numbers" if numbers else ""
    return f"{len(texts)} categories in {name!r}{more}" if len(texts) > MANY or more else ""
