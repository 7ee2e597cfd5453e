"""Schemas: the meaning of tables' columns, so that tables at different sites become the same numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from fewbytes.base.errors import UserError, listed, suggestion

COLUMNS = 5  # maximum number of columns named in an error
SEPARATORS = (",", ";", "\t", "|")
USUAL_MARKS = (
    "", "#N/A", "-", ".", "?", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip
"""The default marks of missing values."""

DOUBT = "check"
"""How a note on a column begins that may be in other units than the server's, or is empty."""
NOT_SCALED = (0.0, 1.0)
"""Mean and standard deviation of a column before they are computed."""


class Schema(msgspec.Struct, frozen=True):
    """How the columns of a table become numbers, and what the target is; serialised as JSON.

    It is read from one table; in a federation from the server's, as other sites' tables may not be pooled. `target`:
    the columns to learn. `learns`: the kind of the target; None: the schema is still to be read from a table, and
    `categories` names columns of categories whatever they look like. `numbers`: mean and standard deviation by column.
    `categories`: each column's values, in the order of their indicators. `dates`: the columns of numbers that are
    dates, as days since 1970. `cuts`: bounds of the groups by which samples with a numeric target are split. `missing`:
    rows with missing values are an error, are dropped, or get the column's mean, or no category.

    The other fields state how tables are read, at all sites. `leave_out`: unused columns. `columns`: the only features,
    if not empty. `missing_marks`: marks of missing values besides empty ones. `limits`: how values like `<0.5` are
    read. `decimal` and `date_order`: the notation of numbers and dates, if values are ambiguous. `encoding`,
    `separator` and `sheet`: of files (empty: detected). `group`: a column that is not a feature; none of its values is
    both in training and in test. `unknown`: values that are not a category are an error, or have no indicator.
    """

    target: tuple[str, ...] = ()
    learns: Literal["classes", "labels", "numbers"] | None = None
    numbers: dict[str, tuple[float, float]] = {}
    categories: dict[str, tuple[str, ...]] = {}
    dates: tuple[str, ...] = ()
    cuts: tuple[float, ...] = ()
    missing: Literal["refuse", "drop", "mean"] = "refuse"
    leave_out: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    missing_marks: tuple[str, ...] = USUAL_MARKS
    limits: Literal["refuse", "half", "value", "missing"] = "refuse"
    decimal: Literal["found", "point", "comma"] = "found"
    date_order: Literal["found", "day-first", "month-first"] = "found"
    encoding: str = ""
    separator: str = ""
    sheet: str = ""
    group: str = ""
    unknown: Literal["refuse", "none"] = "refuse"

    @classmethod
    def read(cls, text: str) -> Self:
        """The schema in this JSON. Raises ValueError."""
        return msgspec.json.decode(text, type=cls)

    def text(self) -> str:
        """The schema as one line of JSON."""
        fields = msgspec.to_builtins(self)
        if self.unknown == "refuse":  # part of runs' fingerprints: earlier ones can be resumed
            del fields["unknown"]
        return json.dumps(fields, ensure_ascii=False)

    @property
    def features(self) -> tuple[str, ...]:
        """The meaning of each number of a sample: a column's name, or `column=category`."""
        plain = [name for name in self.numbers if name not in self.target]
        return (*plain, *(f"{name}={value}" for name, values in self.categories.items() for value in values))

    def names(self, column: str) -> bool:
        """Whether the run itself names the column, so that a node may name it to its server."""
        return (column != "" and column in (*self.target, self.group)) or (
            self.learns is not None and (column in self.numbers or column in self.categories)
        )


class Unclear(Exception):
    """Ambiguous values, or values that need the user's choice: what they are, the remedy, which ones (of a column's
    different values, or rows), and the message for a server (empty: the same)."""

    def __init__(self, what: str, remedy: str, which: NDArray[np.bool_] | None = None, public: str = "") -> None:
        super().__init__(what)
        self.what, self.remedy, self.which, self.public = what, remedy, which, public


def no_column(where: str, name: str, there: Sequence[str], remedy: str) -> UserError:
    """The error for a table that lacks a column named by the run."""
    close = suggestion(name, there)
    if len(there) == 1 and any(mark in there[0] for mark in SEPARATORS):
        close, remedy = "", "give its column separator (--separator)"
    elif similar := [each for each in there if each.strip().casefold() == name.strip().casefold()]:
        close, remedy = "", f"rename its column {similar[0]!r}"
    # without a line of names, columns are named by the first row's values
    shown = f"{where} has no column {name!r}{close}; it has {listed(there, COLUMNS)}: {remedy}"
    return UserError(shown, public=f"a table has no column {name!r}: use the column names of the server's table")


def refused(where: str, what: str, remedy: str, public: str = "", subject: str = "a table") -> UserError:
    """The error for a table, or a part of it: its place, what is wrong as the end of a sentence, and the remedy. The
    server's message is `subject` and `public` (empty: the same), without names of files, columns that the run does not
    name, row numbers and values."""
    wrong = what + (f": {remedy}" if remedy else "")
    return UserError(f"{where} {wrong}", public=f"{subject} {public or wrong}")
