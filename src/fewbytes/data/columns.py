"""Parses columns of text: numbers in various notations, detection limits, and missing values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

import fewbytes.data.dates as dates
from fewbytes.data.schema import Schema, Unclear

NEARLY, HALF = 0.9, 0.5
"""A text column with this share of numbers counts as numeric, with errors: NEARLY if the numbers are few and may be
categories, else HALF."""
FEW = 20  # whole numbers with at most this number of values are classes; with more they are numbers
MOST_EXACT = 10**18  # maximum of numbers with a decimal point that are written as whole numbers
HANDFUL = 5  # number of different numbers that may be categories among texts
UNITS = 5  # maximum number of different units in a column
WHITE = " \t\r\n\u00a0\u202f\ufeff"

PLAIN = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
WHOLE = r"^[+-]?\d+$"
DECIMAL_COMMA = r"^[+-]?\d*,\d+([eE][+-]?\d+)?$"
SPACED = "^[+-]?\\d{1,3}([ '\u2019\u00a0\u202f]\\d{3})+([.,]\\d+)?$"
EITHER_POINT, EITHER_COMMA = r"^[+-]?[1-9]\d{0,2}\.\d{3}$", r"^[+-]?[1-9]\d{0,2},\d{3}$"
THOUSAND_COMMAS = r"^[+-]?[1-9]\d{0,2}((,\d{3})+\.\d+|(,\d{3}){2,})$"
THOUSAND_POINTS = r"^[+-]?[1-9]\d{0,2}((\.\d{3})+,\d+|(\.\d{3}){2,})$"
LIMIT = "^([<>]=?|[≤≥])\\s*"
UNDER = "^(<=?|≤)"
MEASURED = "^(?i:[~€$£¥]|(?:eur|usd|chf|gbp) )? ?[+-]?\\d[\\d.,' ]*( ?[%‰€$£¥°a-zA-Zµμ²³/^]+( [a-zA-Z/]{1,3})?)?$"
CLOCK = r"(?i)^\d{1,2}:\d{2}(:\d{2})?( ?[ap]\.?m\.?)?$"


@dataclass(frozen=True)
class Texts:
    """A text column by its different values: `codes` (n,) index them by row, -1 for none."""

    codes: NDArray[np.int64]
    values: pa.Array
    schema: Schema

    @classmethod
    def of(cls, column: pa.ChunkedArray, schema: Schema) -> Texts:
        """From a column of strings or of a dictionary of strings; marks of missing values become none."""
        column = pc.utf8_trim(column.cast(pa.large_string()), characters=WHITE)
        whole = column.dictionary_encode().combine_chunks()
        whole = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
        codes: NDArray[np.int64] = pc.fill_null(whole.indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
        values = whole.dictionary.cast(pa.large_string())
        none = pc.is_in(values, pa.array(["", *schema.missing_marks], pa.large_string())).to_numpy(zero_copy_only=False)
        none = none | pc.is_null(values).to_numpy(zero_copy_only=False)
        used = np.bincount(codes[codes >= 0], minlength=len(values)).astype(bool) & ~none
        renumbered = np.append(np.where(used, np.cumsum(used) - 1, -1), -1)
        return cls(renumbered[codes], values.filter(pa.array(used)), schema)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """The number of rows of each value."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.values))

    @cached_property
    def known(self) -> int:
        """The number of rows with a value."""
        return int((self.codes >= 0).sum())

    def share(self, which: NDArray[np.bool_]) -> float:
        """The fraction of rows with one of these values, among rows with a value."""
        return float(self.counts[which].sum() / self.known) if self.known else 0.0

    def rows(self, which: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The rows with one of these values."""
        return np.append(which, False)[self.codes]

    def spread(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Each row's number for its value, NaN without a value."""
        return np.append(values, np.nan)[self.codes]

    def like(self, pattern: str, values: pa.Array | None = None) -> NDArray[np.bool_]:
        """Which values match the pattern."""
        matched = pc.match_substring_regex(self.values if values is None else values, pattern)
        found: NDArray[np.bool_] = matched.to_numpy(zero_copy_only=False)
        return found

    @cached_property
    def limits(self) -> NDArray[np.bool_]:
        """Which values are limits, like `<0.5`."""
        return self.like(LIMIT) & (self._pointed | self._comma)

    @cached_property
    def stand(self) -> bool:
        """Whether values are categories as written: neither numbers with commas or limits nor dates."""
        return not self.dates.all() and bool(self.like(PLAIN).all() or not self.numbers.all())

    @cached_property
    def commas(self) -> bool:
        """Whether some numbers have a comma."""
        return bool((self.numbers & self.like(",")).any())

    @cached_property
    def numbers(self) -> NDArray[np.bool_]:
        """Which values are numbers, with points or commas, or limits."""
        return self._pointed | self._comma

    @cached_property
    def _bare(self) -> pa.Array:
        """Values without limit signs, and without spaces and apostrophes between thousands."""
        bare = pc.replace_substring(pc.replace_substring_regex(self.values, LIMIT, ""), "\u2212", "-")
        spaced = pc.match_substring_regex(bare, SPACED)
        return pc.if_else(spaced, pc.replace_substring_regex(bare, "[ '\u2019\u00a0\u202f]", ""), bare)

    @cached_property
    def _pointed(self) -> NDArray[np.bool_]:
        return (
            self.like(PLAIN, self._bare) | self.like(EITHER_COMMA, self._bare) | self.like(THOUSAND_COMMAS, self._bare)
        )

    @cached_property
    def _comma(self) -> NDArray[np.bool_]:
        bare = self._bare
        return (
            self.like(WHOLE, bare)
            | self.like(DECIMAL_COMMA, bare)
            | self.like(EITHER_POINT, bare)
            | self.like(THOUSAND_POINTS, bare)
        )

    @cached_property
    def surely(self) -> set[str]:
        """The unambiguous decimal separators: "point", "comma", both or neither."""
        bare = self._bare
        point = self.like(PLAIN, bare) & ~self.like(WHOLE, bare) & ~self.like(EITHER_POINT, bare)
        comma = self.like(DECIMAL_COMMA, bare) & ~self.like(EITHER_COMMA, bare)
        found = {"point"} if (point | self.like(THOUSAND_COMMAS, bare)).any() else set()
        return found | ({"comma"} if (comma | self.like(THOUSAND_POINTS, bare)).any() else set())

    @cached_property
    def written(self) -> str:
        """The kind of the values: "booleans" if all are, "dates" or "numbers" if most are, else "texts"."""
        if self.known and self.share(self.like(r"(?i)^(true|false)$")) == 1:
            return "booleans"
        if self.known and self.share(self.dates) >= HALF:
            return "dates"
        share = self.share(self.numbers)
        if self.known and share == 1:
            return "numbers"
        if self.few:
            rare = len(self.values) > self.known / 2
            return "numbers" if share >= NEARLY and (rare or not self.whole or self.limits.any()) else "texts"
        return "numbers" if self._most(self.numbers) else "texts"

    @cached_property
    def whole(self) -> bool:
        """Whether all numbers are whole."""
        return not (self.numbers & ~self.like(r"^[+-]?\d+(\.0*)?$", self._bare)).any()

    @cached_property
    def few(self) -> bool:
        """Whether the numbers are few enough to be categories among texts."""
        return int(self.numbers.sum()) <= (FEW if self.whole else HANDFUL)

    @cached_property
    def seem(self) -> str:
        """What most values seem to be if they cannot be parsed, such as times of day; empty if they are texts."""
        measured = self.like(MEASURED) & ~self.numbers
        if measured.any() and self._most(measured | self.numbers):
            units = pc.replace_substring_regex(self.values.filter(pa.array(measured)), "[\\d.,' +-]", "")
            if len(pc.unique(units)) <= UNITS:
                return "numbers with a unit or a sign"
        if self._most(self.like(CLOCK)):
            return "times of day"
        return "dates" if self._most(self.like(dates.OTHERWISE) | self.dates) else ""

    def _most(self, which: NDArray[np.bool_]) -> bool:
        """Whether these are most rows, or most different values."""
        return bool(len(which)) and bool(self.share(which) >= HALF or which.mean() >= HALF)

    @cached_property
    def dates(self) -> NDArray[np.bool_]:
        """Which values are dates."""
        return dates.are_dates(self.values)

    def as_booleans(self) -> NDArray[np.float64]:
        """Rows as 1 for true and 0 for false."""
        return self.spread(self.like("(?i)^true$").astype(float))

    def as_numbers(self, others: set[str]) -> tuple[NDArray[np.float64], str]:
        """(numbers by row, their decimal separator: "point" or "comma"). `others`: the unambiguous separators of the
        file's other columns. Raises Unclear."""
        wrong = ~self.numbers
        if wrong.any():
            count = self.known - int(self.counts[wrong].sum())
            what = f"is not a number, and the column's other {count} values are" if count else "is not a number"
            remedy = (
                "correct it (units and % belong in the column's name), add it to --missing-marks if it means missing, "
                "declare the column as categories (--categories), or leave it out (--leave-out)"
            )
            raise Unclear(what, remedy, wrong, f"a value that is not a number: {remedy}")
        decimal = self._decimal(others)
        bare = self._bare
        if decimal == "comma":
            bare = pc.replace_substring(pc.replace_substring(bare, ".", ""), ",", ".")
        else:
            bare = pc.replace_substring(bare, ",", "")
        bare = pc.replace_substring_regex(bare, r"^\+", "")
        numbers = np.array(bare.cast(pa.float64()).to_numpy(zero_copy_only=False))
        if self.limits.any():
            how = self.schema.limits
            if how == "refuse":
                raise Unclear(
                    "is a limit, such as one of detection, not a value",
                    "choose how to read limits: half the limit, the limit, or missing (--limits half|value|missing)",
                    self.limits,
                )
            if how == "half":
                numbers[self.limits & self.like(UNDER)] /= 2
            elif how == "missing":
                numbers[self.limits] = np.nan
        return self.spread(numbers), decimal

    def _decimal(self, others: set[str]) -> str:
        """The decimal separator. Raises Unclear if it is ambiguous, or both occur."""
        how = self.schema.decimal
        if how != "found":
            allowed = self._comma if how == "comma" else self._pointed
            if not allowed.all():
                raise Unclear(f"is not a number with a decimal {how}", "correct it", ~allowed)
            return how
        if len(self.surely) > 1:
            raise Unclear("has numbers with a decimal point and others with a decimal comma", "write all in one way")
        if self.surely:
            return next(iter(self.surely))
        unclear = self.like(EITHER_COMMA, self._bare)
        if len(others) == 1 and (unclear.any() or "comma" in others):
            return next(iter(others))
        if unclear.any():
            value = self.values[int(unclear.argmax())].as_py()
            raise Unclear(
                f"has {value!r}, which is {value.replace(',', '')} or {value.replace(',', '.')}",
                "choose --decimal point (commas separate thousands) or --decimal comma",
                public="has numbers that may have a decimal comma or thousands separators: --decimal point or comma",
            )
        return "point"

    def as_days(self) -> NDArray[np.float64]:
        """Days since 1970 by row. Raises Unclear for values that are not dates, and for ambiguous ones."""
        wrong = ~self.dates
        if wrong.any():
            raise Unclear("is not a date, and the column's others are", "correct it or leave it empty", wrong)
        return self.spread(dates.days_of(self.values, self.schema.date_order))


def plain(text: str) -> str:
    """The canonical form of a class or category: numbers without redundant signs, points and zeros, booleans in lower
    case."""
    if re.match(WHOLE, text, re.ASCII):
        return str(int(text))
    if re.match(PLAIN, text, re.ASCII):
        value = float(text)
        return str(int(value)) if value.is_integer() and abs(value) < MOST_EXACT else repr(value)
    return text.lower() if text.lower() in ("true", "false") else text


def is_number(text: str) -> bool:
    """Whether a text is a finite number with a decimal point or none."""
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False
