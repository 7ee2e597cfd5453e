"""Tables as data sets: files (`table_files`) and frames of numeric and categorical columns as samples.

Numeric columns are standardised; categorical ones, which are text, become an indicator, 0 or 1, for each category. By
what means, deviations and categories says a `Schema`, which is read off one table and holds for all others.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from fewbytes.base.errors import Slip, UserError, listed, one_line
from fewbytes.base.named import elsewhere
from fewbytes.data.clients import Dataset, split_off_test
from fewbytes.data.schema import COLUMNS, Schema, no_column
from fewbytes.data.split import Split, Targets
from fewbytes.data.table_files import Files, read_columns

TARGETS = ("target", "label", "labels")
"""What a table's target is called where nothing is said."""
FEW = 20  # whole numbers of so many values at most are classes; of more they are numbers
MOST = 1000  # categories of a column; with more, or more than FEW in over half of the rows, it names its rows
FAR = 5  # standard deviations, of a column's mean from the server's
NEARLY = 0.9  # so many of a column's texts that are numbers, and it is one of numbers with some that are wrong


def read_table(name: str, files: Files, schema: Schema, only_test: bool = False) -> Dataset:
    """The data set in files, whose columns mean what the schema says, if it is complete; else it is read off the
    training rows, or off the only ones there are. Of a table that is alone a fixed fifth is for testing, all of it if
    `only_test`.

    Raises UserError, with file, column and remedy, for what cannot be.
    """
    tables = {split: _Table(str(path), read_columns(path, schema)) for split, path in files.items()}
    return _dataset(name, tables.get("train"), tables.get("test"), schema, only_test)


def table(frame: Any, target: str | Sequence[str] = (), test: Any = None, schema: Schema | None = None) -> Dataset:
    """A data set of a pandas frame, a pyarrow table, or columns by name.

    `target`: the column to learn, or several (default: one called as in TARGETS). Text, and whole numbers of at most
    FEW values, are classes; several columns of 0 and 1 are labels of which any may hold; all else is numbers, learnt in
    standard deviations from the mean. `test`: as `frame`; None: a fixed fifth of the samples. `schema`: another data
    set's, so that this one has the same features. Raises UserError, with column and remedy, for what cannot be.
    """
    named = (target,) if isinstance(target, str) else tuple(target)
    mine = _Table("the table", _arrow(frame))
    own = None if test is None else _Table("the test table", _arrow(test))
    return _dataset("table", mine, own, schema or Schema(target=named))


@dataclass(frozen=True)
class _Table:
    """Columns, and where they are from, for errors."""

    where: str
    data: pa.Table

    def column(self, name: str) -> pa.ChunkedArray:
        """Raises UserError unless there is one of that name."""
        there = self.data.column_names
        if name not in there:
            raise no_column(self.where, name, there, "add it, as the run's table has it")
        if there.count(name) > 1:
            raise UserError(f"{self.where} has {there.count(name)} columns called {name!r}: leave one of them")
        return self.data[name]

    def missing(self, name: str) -> NDArray[np.bool_]:
        """In which rows the column has no value."""
        found: NDArray[np.bool_] = pc.is_null(self.column(name), nan_is_null=True).to_numpy()
        return found

    def numbers(self, name: str) -> NDArray[np.float64]:
        """A column as numbers, NaN where there is no value. Raises UserError for text that is none, and infinity."""
        column = self.column(name)
        try:
            values: NDArray[np.float64] = column.cast(pa.float64()).to_numpy().astype(np.float64)
        except pa.ArrowException:
            wrong = np.array([not _is_number(value) for value in self.texts(name)])
            first = next(value for value, is_wrong in zip(self.texts(name), wrong, strict=True) if is_wrong)
            comma = _is_number(str(first).replace(",", "."))
            remedy = "write decimals with a point" if comma else "correct it, or leave the column out everywhere"
            raise self.wrong(name, wrong, "is no number", remedy) from None
        if np.isinf(values).any():
            raise self.wrong(name, np.isinf(values), "is no finite number", "correct it")
        return values

    def texts(self, name: str) -> list[str | None]:
        """A column as text, None where there is no value; of whole numbers without a point."""
        column = self.column(name)
        if pa.types.is_floating(column.type):
            values = self.numbers(name)
            if np.all(np.isnan(values) | (values == np.floor(values))):
                return [None if math.isnan(value) else str(int(value)) for value in values]
        made: list[str | None] = column.cast(pa.string()).to_pylist()
        return made

    def is_text(self, name: str) -> bool:
        """Whether a column is text, not numbers. Raises UserError for dates and all else that is neither."""
        kind = self.column(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            return True
        if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
            return False
        what = "no value" if pa.types.is_null(kind) else f"{kind} values"
        what = "text that is not in UTF-8" if pa.types.is_binary(kind) else what
        raise UserError(f"{self.where}: column {name!r} has {what}: give numbers or text, or leave it out")

    def wrong(self, name: str, rows: NDArray[np.bool_], what: str, remedy: str) -> UserError:
        """An error of the first of those rows of a column, which count from 1."""
        found = np.flatnonzero(rows)
        row = int(found[0])
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        value = self.column(name)[row].as_py()
        place = f"{self.where}: column {name!r}, row {row + 1} of the data{more}"
        if value is None or value != value:
            return UserError(f"{place}: nothing {what}: {remedy}")
        return UserError(f"{place}: {value!r} {what}: {remedy}", told=f"{place}: a value {what}: {remedy}")


def _dataset(name: str, train: _Table | None, test: _Table | None, schema: Schema, only_test: bool = False) -> Dataset:
    tables = [each for each in (train, test) if each is not None]
    for each in tables:
        if not len(each.data):
            raise UserError(f"{each.where} has no row: add some")
    read_off = None
    if schema.learns is None:
        read_off, schema = tables[0], _read_off(tables[0], schema)
    classes = schema.target
    if schema.learns == "classes":
        classes = tuple(_in_order(value for each in tables for value in each.texts(schema.target[0])))
    splits = [_split(each, schema, classes) for each in tables]
    if read_off is not tables[0]:
        _warn_of_units(tables[0], schema)
    if len(splits) == 2:
        mine, own = splits
    elif only_test:
        mine, own = splits[0].take([]), splits[0]
    else:
        mine, own = split_off_test(splits[0])
    return Dataset(name, mine, own, classes, _groups(schema), schema)


# What columns mean ----------------------------------------------------------------------------------------------------


def _read_off(table: _Table, asked: Schema) -> Schema:
    """What this table's columns mean, and what is learnt of those that are asked for."""
    target = asked.target or tuple(name for name in TARGETS if name in table.data.column_names)[:1]
    if len(set(target)) < len(target):
        raise UserError(f"what is learnt ({listed(target)}) names a column twice: name each once (--target)")
    for name in target:
        if name not in table.data.column_names:
            raise no_column(table.where, name, table.data.column_names, "name one that is there (--target)")
    if not target:
        columns = listed(table.data.column_names, COLUMNS)
        raise UserError(f"{table.where} has the columns {columns}: say which is learnt (--target COLUMN)")
    features = [name for name in dict.fromkeys(table.data.column_names) if name not in target]
    if not features:
        raise UserError(f"{table.where} has no column beside what is learnt ({listed(target)}): add some")
    learns = _learns(table, target)
    numeric = [name for name in features if not table.is_text(name)]
    categories = {
        name: _categories(
            table, name, f"take it out of the table, group them, or have them read as text (--text {name})"
        )
        for name in features
        if name not in numeric
    }
    cuts: list[float] = []
    if learns == "numbers":
        numeric += target
        cuts = np.unique(np.nanquantile(table.numbers(target[0]), np.arange(1, 10) / 10)).tolist()
    numbers = {name: _scale(table.numbers(name)) for name in numeric}
    return msgspec.structs.replace(
        asked, target=target, learns=learns, numbers=numbers, categories=categories, cuts=tuple(cuts)
    )


def _learns(table: _Table, target: Sequence[str]) -> str:
    """What is learnt of these columns. Raises UserError for several of text."""
    text = [name for name in target if table.is_text(name)]
    if len(target) == 1:
        if text:
            _categories(table, target[0], "name another (--target), or group them into classes")
            return "classes"
        return "classes" if _few(table.numbers(target[0])) else "numbers"
    if text:
        raise UserError(f"{table.where}: column {text[0]!r} is text: of several columns learnt at once all are numbers")
    marks = all(np.isin(values[~np.isnan(values)], (0, 1)).all() for values in map(table.numbers, target))
    return "labels" if marks else "numbers"


def _few(values: NDArray[np.float64]) -> bool:
    """Whether numbers are so few whole ones that they are classes."""
    different = np.unique(values[~np.isnan(values)])
    return bool(len(different) <= FEW and np.all(different == np.floor(different)))


def _categories(table: _Table, name: str, remedy: str) -> tuple[str, ...]:
    """What the texts of a column are, in order. Raises UserError for numbers of which some are wrong, and, with a
    remedy, for texts that hardly occur twice."""
    texts = [text for text in table.texts(name) if text is not None]
    different = tuple(_in_order(texts))
    numbers = np.array([float(text) for text in texts if _is_number(text)])
    rare = len(different) > len(texts) / 2
    if NEARLY * len(texts) <= len(numbers) < len(texts) and (rare or not _few(numbers)):
        wrong = np.array([not _is_number(text) for text in table.texts(name)])
        what = f"is no number, as the column's other {len(numbers)} values are"
        raise table.wrong(name, wrong, what, "correct it, or empty it and run with --missing drop")
    if len(different) > MOST or (rare and len(different) > FEW):
        found = f"{table.where}: column {name!r} has {len(different)} different texts in {len(texts)} rows"
        if len(numbers) == len(texts):
            raise UserError(f"{found}, all of them numbers: store it as numbers")
        raise UserError(f"{found}, too many for categories (does it name the rows?): {remedy}")
    return different


def _scale(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and standard deviation, 1 for equal values."""
    known = values[~np.isnan(values)]
    if not len(known):
        return 0.0, 1.0
    return float(known.mean()), float(known.std()) or 1.0


def _warn_of_units(table: _Table, schema: Schema) -> None:
    """Warn of a column that is far from what the schema was read off: its own in other units, perhaps."""
    for name, (mean, deviation) in schema.numbers.items():
        values = (table.numbers(name) - mean) / deviation
        values = values[~np.isnan(values)]
        if len(values) and max(abs(values.mean()), values.std() / 2) > FAR:
            warnings.warn(
                f"{table.where}: column {name!r} is far from the server's table (mean {values.mean():.3g}, standard "
                f"deviation {values.std():.3g}, where that has 0 and 1): is it in the same units?",
                Slip,
                stacklevel=2,
            )


def _groups(schema: Schema) -> tuple[str, ...] | None:
    """The labels by which samples are dealt out, where they are not the classes: the first label that a sample has; in
    which tenth of the first table's rows a number would be."""
    if schema.learns == "classes":
        return None
    if schema.learns == "labels":
        return (*schema.target, "none")
    cuts = [f"{cut:.4g}" for cut in schema.cuts]
    if not cuts:
        return ("all",)
    return (f"below {cuts[0]}", *(f"{a} to {b}" for a, b in pairwise(cuts)), f"from {cuts[-1]}")


# Rows as samples ------------------------------------------------------------------------------------------------------


def _split(table: _Table, schema: Schema, classes: Sequence[str]) -> Split:
    """A table's rows as samples float32 (n, features)."""
    features = [*(name for name in schema.numbers if name not in schema.target), *schema.categories]
    gone = _missing(table, schema, features)
    parts = [_indicators(table, n, schema) if n in schema.categories else _scaled(table, n, schema) for n in features]
    x = np.concatenate(parts, axis=1)[~gone]
    if not len(x):
        raise UserError(f"{table.where} has no row{' without a missing value' if gone.any() else ''}: add some")
    if schema.learns == "classes":
        number = {name: i for i, name in enumerate(classes)}
        names = np.array(table.texts(schema.target[0]), dtype=object)[~gone]
        return Split(torch.from_numpy(x), torch.tensor([number[name] for name in names]))
    values = np.stack([table.numbers(name) for name in schema.target], axis=1)[~gone]
    if schema.learns == "labels":
        if not np.isin(values, (0, 1)).all():
            raise UserError(f"{table.where}: the labels {listed(schema.target)} are 0 or 1, and some here are not")
        y = np.where(values.any(axis=1), values.argmax(axis=1), len(schema.target))
    else:
        y = np.searchsorted(schema.cuts, values[:, 0], side="right")
        mean, deviation = np.array([schema.numbers[name] for name in schema.target]).T
        values = (values - mean) / deviation
        values = values[:, 0] if len(schema.target) == 1 else values
    learnt = Targets("labels" if schema.learns == "labels" else "numbers", torch.from_numpy(values.astype(np.float32)))
    return Split(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)), learnt=learnt)


def _missing(table: _Table, schema: Schema, features: Sequence[str]) -> NDArray[np.bool_]:
    """Which rows are left out as a value is missing. Raises UserError if that must not be."""
    gone = np.zeros(len(table.data), dtype=bool)
    for name in (*features, *schema.target):
        missing = table.missing(name)
        if schema.missing == "drop":
            gone |= missing
        elif missing.any() and (schema.missing == "refuse" or name in schema.target):
            also = ", or --missing mean" if name not in schema.target else ""
            whose = ", or have the server run" if elsewhere() else ", or run"
            raise table.wrong(name, missing, "stands there", f"fill it in{whose} with --missing drop{also}")
    return gone


def _scaled(table: _Table, name: str, schema: Schema) -> NDArray[np.float32]:
    """A numeric column (n, 1), in standard deviations from its mean; 0 where there is no value."""
    mean, deviation = schema.numbers[name]
    scaled: NDArray[np.float32] = np.nan_to_num((table.numbers(name) - mean) / deviation).astype(np.float32)
    return scaled[:, None]


def _indicators(table: _Table, name: str, schema: Schema) -> NDArray[np.float32]:
    """A categorical column (n, categories); zeros where there is no value."""
    known, values = schema.categories[name], table.texts(name)
    strange = np.array([value is not None and value not in known for value in values])
    if strange.any():
        lacks = f"is a category that the run's table lacks (it has {listed(known)})"
        raise table.wrong(name, strange, lacks, "correct it, or add a row with it to the server's table")
    found = np.array([-1 if value is None else known.index(value) for value in values])
    indicators: NDArray[np.float32] = (found[:, None] == np.arange(len(known))).astype(np.float32)
    return indicators


# Frames and words -----------------------------------------------------------------------------------------------------


def _arrow(frame: Any) -> pa.Table:
    try:
        if isinstance(frame, pa.Table):
            return frame
        return (
            pa.table(dict(frame)) if isinstance(frame, Mapping) else pa.Table.from_pandas(frame, preserve_index=False)
        )
    except (pa.ArrowException, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"a table is a pandas frame, a pyarrow table or columns by name: {one_line(error)}") from None


def _in_order(values: Any) -> list[str]:
    """The different ones of texts, numbers by their size, before other texts."""
    different = {value for value in values if value is not None}
    return sorted(different, key=lambda text: (0, float(text), text) if _is_number(text) else (1, 0.0, text))


def _is_number(text: str | None) -> bool:
    """Also for a missing value."""
    try:
        return text is None or math.isfinite(float(text))
    except ValueError:
        return False
