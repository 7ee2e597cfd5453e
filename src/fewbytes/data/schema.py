"""What the columns of tables mean, so that tables that lie apart become the same numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, Self

import msgspec

from fewbytes.base.errors import UserError, listed, suggestion

COLUMNS = 5  # that an error names
MARKS = (";", "\t", "|")  # that separate columns in what is no CSV of ours


class Schema(msgspec.Struct, frozen=True):
    """How the columns of a table become numbers, and what is learnt of them; JSON says the same.

    It is read off one table, in a federation the server's, as nobody else's may be pooled. `target`: what is learnt.
    `learns`: of which kind that is; None: the schema is still to be read off a table. `numbers`: by column its mean and
    standard deviation. `categories`: by column what its values are, in the order of their indicators. `cuts`: between
    what groups of samples a target that is a number is dealt out. `missing`: what becomes of rows in which a value is
    missing: they are an error, are left out, or get the column's mean, or no category.
    """

    target: tuple[str, ...] = ()
    learns: Literal["classes", "labels", "numbers"] | None = None
    numbers: dict[str, tuple[float, float]] = {}
    categories: dict[str, tuple[str, ...]] = {}
    cuts: tuple[float, ...] = ()
    missing: Literal["refuse", "drop", "mean"] = "refuse"

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


def no_column(where: str, name: str, there: Sequence[str], remedy: str) -> UserError:
    """What to raise for a table without a column of that name."""
    lacks, close = f"{where} has no column {name!r}", suggestion(name, there)
    if len(there) == 1 and any(mark in there[0] for mark in MARKS):
        close, remedy = "", "separate columns by commas, and write decimals with a point"
    elif alike := [each for each in there if each.strip().casefold() == name.strip().casefold()]:
        close, remedy = "", f"call its column {alike[0]!r} so"
    # columns of a table without a line of names are called as its first row has it
    return UserError(f"{lacks}{close}; it has {listed(there, COLUMNS)}: {remedy}", f"{lacks}: {remedy}")
