"""A table's columns as numbers or categories, and errors that name their place."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

import fewbytes.data.dates as dates
from fewbytes.base.errors import UserError, one_line
from fewbytes.base.named import elsewhere
from fewbytes.data.columns import Texts, is_number, plain
from fewbytes.data.marks import MARKS, far_marks
from fewbytes.data.schema import NOT_SCALED, USUAL_MARKS, Schema, Unclear, no_column, refused

USUAL = 3  # standard deviations around the server's mean, within which values are not marks
SHORT = 100_000  # rows; numbers of shorter tables, which may have many columns, are converted only once


class Table:
    """Columns; their origin `where`; the `schema` for reading them; `notes` on reading the file.

    `decimals`: the decimal separator of the file's numbers if the reader knows it: "point", or nothing.
    """

    def __init__(
        self, where: str, data: pa.Table, schema: Schema, notes: tuple[str, ...] = (), decimals: Iterable[str] = ()
    ) -> None:
        self.where, self.data, self.schema, self.notes = where, data, schema, notes
        self._decimals = set(decimals)
        self._texts: dict[str, Texts] = {}
        self._numbers: dict[str, NDArray[np.float64]] = {}
        self._checked: set[str] = set()
        self._stored: dict[str, str] = {}
        self.commas: list[str] = []
        """The columns that were read with a decimal comma."""
        self.thousands: list[str] = []
        """The columns in which commas were read as thousands separators."""
        self.limits: dict[str, int] = {}
        """By column the number of limits, such as `<0.5`."""
        self.far: dict[str, list[int]] = {}
        """By column the numbers that seem to mean missing values, but are kept, as the user names the marks."""
        self._dated: set[str] = set()

    def __len__(self) -> int:
        return int(self.data.num_rows)

    @cached_property
    def names(self) -> dict[str, int]:
        """The columns' names in order, with their positions."""
        return {name: i for i, name in enumerate(self._all)}

    @cached_property
    def _all(self) -> list[str]:
        return list(self.data.column_names)

    @cached_property
    def _repeated(self) -> dict[str, int]:
        return {name: count for name, count in Counter(self._all).items() if count > 1}

    @cached_property
    def index(self) -> tuple[str, ...]:
        """The columns with the rows' index, by pandas's metadata."""
        about = json.loads((self.data.schema.metadata or {}).get(b"pandas", b"{}"))
        return tuple(name for name in about.get("index_columns", ()) if isinstance(name, str))

    def column(self, name: str) -> pa.ChunkedArray:
        """The column of that name. Raises UserError unless there is exactly one."""
        if name not in self.names:
            raise no_column(
                self.where, name, self._all, "add it; the column must have the same name as in the server's table"
            )
        if name in self._repeated:
            raise self.refused(name, f"occurs {self._repeated[name]} times", "keep one of them")
        return self.data.column(self.names[name])

    def stored(self, name: str) -> str:
        """The storage: "texts", "categories", "numbers", "booleans" or "dates". Raises UserError for other types."""
        if name in self._stored:
            return self._stored[name]
        kind = self.column(name).type
        if known := _stored_as(kind):
            self._stored[name] = known
            return known
        if pa.types.is_null(kind) and self.schema.learns is not None:
            return "texts" if name in self.schema.categories else "numbers"
        what = "no value" if pa.types.is_null(kind) else f"{kind} values"
        what = "text that is not in UTF-8" if pa.types.is_binary(kind) else what
        raise self.refused(name, f"has {what}", "give numbers, dates or text, or leave it out (--leave-out)")

    def kind(self, name: str) -> str:
        """The kind of a column: "texts", "numbers", "booleans" or "dates"."""
        stored = self.stored(name)
        if name in self.schema.categories:
            return "texts"
        if stored == "numbers":
            self.numbers(name)
            return "dates" if name in self._dated else stored
        if stored not in ("texts", "categories"):
            return stored
        texts = self.texts(name)
        codes = stored == "categories" and texts.whole  # the file's writer made them categories
        return "texts" if texts.written == "numbers" and codes else texts.written

    def texts(self, name: str) -> Texts:
        """A column of text by its different values."""
        if name not in self._texts:
            self._texts[name] = Texts.of(self.column(name), self.schema)
        return self._texts[name]

    def missing(self, name: str) -> NDArray[np.bool_]:
        """The rows without a value in the column."""
        if name not in self.schema.numbers and self.stored(name) in ("texts", "categories"):
            return self.texts(name).codes < 0
        return np.isnan(self.numbers(name))

    def numbers(self, name: str) -> NDArray[np.float64]:
        """A column as numbers, dates as days since 1970, NaN without a value. Raises UserError for other text,
        infinity, and a number that seems to mean a missing value."""
        if name in self._numbers:
            return self._numbers[name]
        stored, column = self.stored(name), self.column(name)
        dated = stored == "dates" or (stored in ("texts", "categories") and self.texts(name).written == "dates")
        if dated and self.schema.learns is not None and name in self.schema.numbers and name not in self.schema.dates:
            raise self.refused(name, "has dates, and numbers in the server's table", "write numbers here, too")
        if stored == "dates":
            return dates.days_of_times(column)
        if stored == "booleans":
            return _floats(pc.cast(column, pa.uint8()))
        values = _floats(column) if stored == "numbers" else self._read_numbers(name)
        if self._marks:
            values = np.where(np.isin(values, self._marks), np.nan, values)
        if name not in self._checked:
            self._check(name, values)
        of_classes = self.schema.learns == "classes" and name in self.schema.target
        if stored == "numbers" and (self.schema.learns is None or of_classes or name in self.schema.dates):
            values = self._as_days(name, values)
        if stored != "numbers" or len(self) < SHORT:
            self._numbers[name] = values
        return values

    def categories(self, name: str) -> tuple[NDArray[np.int64], list[str]]:
        """(codes (n,), texts): the index of each row's text, -1 for none; texts are canonical (`plain`)."""
        kind = self.kind(name)
        texts = self.texts(name) if self.stored(name) in ("texts", "categories") else None
        if texts is not None and (name in self.schema.categories or texts.stand):
            codes, written = texts.codes, [plain(text) for text in texts.values.to_pylist()]
        elif pa.types.is_integer(self.column(name).type) and kind != "dates":  # exact, also above 2^53
            different, codes = np.unique(pc.fill_null(self.column(name), 0).to_numpy(), return_inverse=True)
            codes = np.where(np.isnan(self.numbers(name)), -1, codes)
            written = [str(value) for value in different]
        else:
            values = self.numbers(name)
            different, codes = np.unique(values, return_inverse=True)  # NaN is the last
            codes = np.where(np.isnan(values), -1, codes)
            write = {"booleans": lambda v: ("false", "true")[int(v)], "dates": dates.written}
            written = [write.get(kind, lambda v: plain(repr(v)))(float(v)) for v in different if v == v]
        used = np.bincount(codes[codes >= 0], minlength=len(written)).astype(bool)
        number = {text: i for i, text in enumerate(dict.fromkeys(t for t, u in zip(written, used, strict=True) if u))}
        return np.array([*(number.get(text, -1) for text in written), -1], dtype=np.int64)[codes], list(number)

    def refused(self, name: str, what: str, remedy: str, public: str = "") -> UserError:
        """An error of a column. The server's version names it if the run does, and has `public` in place of `what`."""
        column = f"column {name!r}" if self.schema.names(name) else "column"
        return refused(f"{self.where}: column {name!r}", what, remedy, public, f"a table's {column}")

    def wrong(self, name: str, rows: NDArray[np.bool_], what: str, remedy: str, public: str = "") -> UserError:
        """An error of the first of these rows of a column, counted from 1; `public` as in `refused`."""
        value = self.column(name)[int(np.flatnonzero(rows)[0])].as_py()
        return self._in_rows(name, rows, f"{value!r} {what}", remedy, public or f"a value that {what}: {remedy}")

    def lacking(self, name: str, rows: NDArray[np.bool_], remedy: str) -> UserError:
        """An error of rows of a column without a value."""
        value = self.column(name)[int(np.flatnonzero(rows)[0])].as_py()
        mark = f" ({value!r})" if isinstance(value, str) and value.strip() else ""
        what = f"the value is missing{mark}"
        return self._in_rows(name, rows, what, remedy, f"missing values in some rows: {remedy}")

    def _in_rows(self, name: str, rows: NDArray[np.bool_], what: str, remedy: str, public: str) -> UserError:
        found = np.flatnonzero(rows)
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        column = f"column {name!r}" if self.schema.names(name) else "column"
        place = f"{self.where}: column {name!r}, row {int(found[0]) + 1} of the data{more}:"
        return refused(place, what, remedy, f"has {public}", f"a table's {column}")

    def _read_numbers(self, name: str) -> NDArray[np.float64]:
        """A column of text as numbers."""
        texts = self.texts(name)
        try:
            if texts.written == "dates":
                return texts.as_days()
            if texts.written == "booleans":
                return texts.as_booleans()
            values, decimal = texts.as_numbers(self._surely)
        except Unclear as error:
            if error.which is not None:
                raise self.wrong(name, texts.rows(error.which), error.what, error.remedy, error.public) from None
            raise self.refused(name, error.what, error.remedy, error.public) from None
        if texts.limits.any():
            self.limits[name] = int(texts.counts[texts.limits].sum())
        for found, where in ((decimal == "comma", self.commas), (decimal == "point" and texts.commas, self.thousands)):
            if found and name not in where:
                where.append(name)
        return values

    def _as_days(self, name: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Numbers like 20200131 as days since 1970 if all are dates, else unchanged."""
        days = dates.days_of_numbers(values)
        if days is not None:
            self._dated.add(name)
            return days
        if name in self.schema.dates and not np.isnan(values).all():
            raise self.refused(name, "has no dates, but the server's table has", "write dates like 2020-01-31")
        return values

    @property
    def _surely(self) -> set[str]:
        """The unambiguous decimal separators in all text columns read so far."""
        read = [texts.surely for texts in self._texts.values() if texts.written == "numbers"]
        return self._decimals.union(*read)

    @cached_property
    def _marks(self) -> list[float]:
        """The numbers that mark a missing value."""
        return [float(mark) for mark in self.schema.missing_marks if is_number(mark)]

    def _check(self, name: str, values: NDArray[np.float64]) -> None:
        """Raises UserError for infinity, and for a number that seems to mean a missing value."""
        self._checked.add(name)
        ends = {float(np.fmin.reduce(values)), float(np.fmax.reduce(values))} if len(values) else set()
        if math.inf in ends or -math.inf in ends:
            raise self.wrong(name, np.isinf(values), "is not a finite number", "correct it")
        if found := self._far_marks(name, values) if ends.intersection(MARKS) else []:
            marks = ",".join(map(str, found))
            if self.schema.missing_marks != USUAL_MARKS:
                self.far[name] = found
                return
            others = values[~np.isin(values, found) & ~np.isnan(values)]
            raise self.wrong(
                name,
                np.isin(values, found),
                f"is far from all other values ({others.min():g} to {others.max():g})",
                f"if it means missing, add it to the marks (--missing-marks NA,{marks}); if not, give only the "
                "marks that do (--missing-marks NA)",
                "a value far from all others, which may mean missing: give the values that mean missing "
                "(--missing-marks)",
            )

    def _far_marks(self, name: str, values: NDArray[np.float64]) -> list[int]:
        """As `far_marks`; none for class numbers, if the server's table has defined the classes."""
        if name in self.schema.target and self.schema.learns == "classes":
            return []
        marks = [mark for mark in MARKS if mark != 9 or name not in self.schema.target]
        mean, deviation = scale = self.schema.numbers.get(name, NOT_SCALED)
        usual = None if scale == NOT_SCALED else (mean - USUAL * deviation, mean + USUAL * deviation)
        return far_marks(values, marks, usual)


def as_arrow(frame: Any) -> pa.Table:
    """A pandas frame, a pyarrow table or columns by name. Raises UserError for anything else."""
    try:
        if isinstance(frame, pa.Table):
            return frame
        return (
            pa.table(dict(frame)) if isinstance(frame, Mapping) else pa.Table.from_pandas(frame, preserve_index=False)
        )
    except (pa.ArrowException, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"a table is a pandas frame, a pyarrow table or columns by name: {one_line(error)}") from None


def run_with(option: str) -> str:
    """The instruction to set an option: on this command, or on a remote server."""
    return f"have the server run with {option}" if elsewhere() else f"run with {option}"


@functools.cache
def _stored_as(kind: pa.DataType) -> str:
    """The storage of a type's columns; empty for other types."""
    if pa.types.is_dictionary(kind):
        return "categories" if _is_string(kind.value_type) else "numbers"
    if _is_string(kind):
        return "texts"
    if pa.types.is_boolean(kind):
        return "booleans"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "numbers"
    return "dates" if pa.types.is_date(kind) or pa.types.is_timestamp(kind) else ""


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _floats(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """Numbers of any type, NaN without a value. Integers above 2^53 are rounded."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    values: NDArray[np.float64] = pc.cast(column, pa.float64(), safe=False).to_numpy().astype(np.float64, copy=False)
    return values
