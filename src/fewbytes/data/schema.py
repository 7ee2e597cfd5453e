"""What the columns of tables mean, so that tables that lie apart become the same numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from fewbytes.base.errors import UserError, listed, suggestion

COLUMNS = 5  # that an error names
SEPARATORS = (",", ";", "\t", "|")
USUAL_MARKS = (
    "", "#N/A", "-", ".", "?", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip
"""What stands for a missing value where nothing else is said."""

NOT_SCALED = (0.0, 1.0)
"""Mean and standard deviation of a column before they are read off rows."""


class Schema(msgspec.Struct, frozen=True):
    """How the columns of a table become numbers, and what is learnt of them; JSON says the same.

    It is read off one table, in a federation the server's, as nobody else's may be pooled. `target`: what is learnt.
    `learns`: of which kind that is; None: the schema is still to be read off a table, and `categories` names columns
    that hold such whatever they look like. `numbers`: by column its mean and standard deviation.
    `categories`: by column what its values are, in the order of their indicators. `dates`: the
    columns of numbers that are dates, as days since 1970. `cuts`: between what groups of samples a target that is a
    number is split. `missing`: what becomes of rows in which a value is missing: they are an error, are left out,
    or get the column's mean, or no category.

    The rest says how tables are read, here as at every site. `leave_out`: columns that are not used. `columns`: the
    only features, if it names some. `missing_marks`: what stands for a missing value besides nothing at all. `limits`:
    what values like `<0.5` become. `decimal` and `date_order`: how numbers and dates are written, where values alone do
    not tell. `encoding`, `separator` and `sheet`: of files (empty: found).
    `group`: a column that is no feature, and none of whose values is both in training and in test.
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

    @classmethod
    def read(cls, text: str) -> Self:
        """The schema that JSON says. Raises ValueError."""
        return msgspec.json.decode(text, type=cls)

    def text(self) -> str:
        """As JSON in one line."""
        return json.dumps(msgspec.to_builtins(self), ensure_ascii=False)

    @property
    def features(self) -> tuple[str, ...]:
        """What each number of a sample is: a column's name, or `column=category`."""
        plain = [name for name in self.numbers if name not in self.target]
        return (*plain, *(f"{name}={value}" for name, values in self.categories.items() for value in values))

    def names(self, column: str) -> bool:
        """Whether the run itself names a column, so that a node may tell its server of it."""
        return (column != "" and column in (*self.target, self.group)) or (
            self.learns is not None and (column in self.numbers or column in self.categories)
        )


class Unclear(Exception):
    """Values that could be read in two ways, or need the user's choice: what they are, the remedy, which (of a column's
    different values, or its rows), and what a server is told (empty: the same)."""

    def __init__(self, what: str, remedy: str, which: NDArray[np.bool_] | None = None, public: str = "") -> None:
        super().__init__(what)
        self.what, self.remedy, self.which, self.public = what, remedy, which, public


def no_column(where: str, name: str, there: Sequence[str], remedy: str) -> UserError:
    """What to raise for a table without a column of that name, which the run names."""
    close = suggestion(name, there)
    if len(there) == 1 and any(mark in there[0] for mark in SEPARATORS):
        close, remedy = "", "give its column separator (--separator)"
    elif similar := [each for each in there if each.strip().casefold() == name.strip().casefold()]:
        close, remedy = "", f"rename its column {similar[0]!r}"
    # columns of a table without a line of names are called as its first row has it
    shown = f"{where} has no column {name!r}{close}; it has {listed(there, COLUMNS)}: {remedy}"
    return UserError(shown, public=f"a table has no column {name!r}: use the column names of the server's table")


def refused(where: str, what: str, remedy: str, public: str = "", subject: str = "a table") -> UserError:
    """What to raise for a table, or a part of it, that is not as it should be: where that is, what is wrong, as the
    sentence goes on, and the remedy. For a server the sentence is `subject` and `public` (empty: the same), without
    names of files, of columns that the run does not name, numbers of rows, and values."""
    wrong = what + (f": {remedy}" if remedy else "")
    return UserError(f"{where} {wrong}", public=f"{subject} {public or wrong}")
