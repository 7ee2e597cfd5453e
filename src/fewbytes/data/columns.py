"""Columns of text understood: numbers however they are written, dates, limits of detection, and missing values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fewbytes.data.schema import Schema

NEARLY = 0.9  # a column of text with this share of numbers is one of numbers, some of which are wrong
FEW = 20  # whole numbers of so many values at most are classes; of more they are numbers
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
ISO_DATE = r"^\d{4}[-/]\d{2}[-/]\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:?\d{2})?)?$"
DATE = r"^(\d{1,2})[./-](\d{1,2})[./-](\d{4})$"
SECONDS_A_DAY = 86_400


class Unclear(Exception):
    """A column that could be read in two ways, or has values that need the user's choice: what, and the remedy."""

    def __init__(self, what: str, remedy: str, rows: NDArray[np.bool_] | None = None, told: str = "") -> None:
        super().__init__(what)
        self.what, self.remedy, self.rows, self.told = what, remedy, rows, told


@dataclass(frozen=True)
class Texts:
    """A column of text by its different values: `codes` (n,) says which one a row has, -1 none."""

    codes: NDArray[np.int64]
    values: pa.Array
    schema: Schema

    @classmethod
    def of(cls, column: pa.ChunkedArray, schema: Schema) -> Texts:
        """Of a column of strings or of a dictionary of such; what stands for a missing value is none."""
        if not pa.types.is_dictionary(column.type):
            column = pc.utf8_trim(column.cast(pa.large_string()), characters=WHITE).dictionary_encode()
        whole = column.combine_chunks()
        whole = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
        codes: NDArray[np.int64] = pc.fill_null(whole.indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
        values = whole.dictionary.cast(pa.large_string())
        gone = pc.is_in(values, pa.array(["", *schema.missing_marks], pa.large_string())).to_numpy(zero_copy_only=False)
        gone = gone | pc.is_null(values).to_numpy(zero_copy_only=False)
        used = np.bincount(codes[codes >= 0], minlength=len(values)).astype(bool) & ~gone
        renumbered = np.append(np.where(used, np.cumsum(used) - 1, -1), -1)
        return cls(renumbered[codes], values.filter(pa.array(used)), schema)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """How often each value occurs."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.values))

    @cached_property
    def known(self) -> int:
        """In how many rows there is a value."""
        return int((self.codes >= 0).sum())

    def share(self, which: NDArray[np.bool_]) -> float:
        """Of rows with a value, the part whose value is one of those."""
        return float(self.counts[which].sum() / self.known) if self.known else 0.0

    def rows(self, which: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The rows whose value is one of those."""
        return np.append(which, False)[self.codes]

    def spread(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """By row what its value stands for, NaN where there is none."""
        return np.append(values, np.nan)[self.codes]

    def like(self, pattern: str, values: pa.Array | None = None) -> NDArray[np.bool_]:
        """Which values are so."""
        matched = pc.match_substring_regex(self.values if values is None else values, pattern)
        found: NDArray[np.bool_] = matched.to_numpy(zero_copy_only=False)
        return found

    @cached_property
    def limits(self) -> NDArray[np.bool_]:
        """Which values are limits of numbers, like `<0.5`."""
        return self.like(LIMIT) & (self._pointed | self._comma)

    @cached_property
    def numbers(self) -> NDArray[np.bool_]:
        """Which values are numbers, with points or commas, or limits of such."""
        return self._pointed | self._comma

    @cached_property
    def _bare(self) -> pa.Array:
        """Values without the marks of limits, and the spaces and apostrophes between thousands."""
        bare = pc.replace_substring_regex(self.values, LIMIT, "")
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
        """By what its decimals are separated for certain: "point", "comma", both or neither."""
        bare = self._bare
        point = self.like(PLAIN, bare) & ~self.like(WHOLE, bare) & ~self.like(EITHER_POINT, bare)
        comma = self.like(DECIMAL_COMMA, bare) & ~self.like(EITHER_COMMA, bare)
        found = {"point"} if (point | self.like(THOUSAND_COMMAS, bare)).any() else set()
        return found | ({"comma"} if (comma | self.like(THOUSAND_POINTS, bare)).any() else set())

    @cached_property
    def written(self) -> str:
        """Whether these are all "booleans", are mostly "dates", are mostly "numbers", or else "texts"."""
        if self.known and self.share(self.like(r"(?i)^(true|false)$")) == 1:
            return "booleans"
        if self.share(self.dates) >= NEARLY:
            return "dates"
        share = self.share(self.numbers)
        if self.known and share == 1:
            return "numbers"
        whole = self.like(WHOLE)
        rare = len(self.values) > self.known / 2
        few = not (self.numbers & ~whole).any() and int(whole.sum()) <= FEW
        return "numbers" if share >= NEARLY and (rare or not few or self.limits.any()) else "texts"

    @cached_property
    def dates(self) -> NDArray[np.bool_]:
        """Which values are dates."""
        return self.like(ISO_DATE) | self.like(DATE)

    def as_booleans(self) -> NDArray[np.float64]:
        """Rows as 1 for true and 0 for false."""
        return self.spread(self.like("(?i)^true$").astype(float))

    def as_numbers(self, others: set[str]) -> tuple[NDArray[np.float64], str]:
        """(rows as numbers, how their decimals are separated: "point" or "comma"). `others`: how those of the file's
        other columns are, for certain. Raises Unclear."""
        wrong = ~self.numbers
        if wrong.any():
            count = self.known - int(self.counts[wrong].sum())
            what = f"is no number, as the column's other {count} values are" if count else "is no number"
            remedy = "correct it, name it if it stands for a missing value (--missing-marks), or leave the column out"
            raise Unclear(what, f"{remedy} (--leave-out)", self.rows(wrong), f"a value that is no number: {remedy}")
        decimal = self._decimal(others)
        bare = self._bare
        if decimal == "comma":
            bare = pc.replace_substring(pc.replace_substring(bare, ".", ""), ",", ".")
        else:
            bare = pc.replace_substring(bare, ",", "")
        bare = pc.replace_substring_regex(bare, r"^\+", "")
        made = np.array(bare.cast(pa.float64()).to_numpy(zero_copy_only=False))
        if self.limits.any():
            how = self.schema.limits
            if how == "refuse":
                raise Unclear(
                    "is a limit, such as one of detection, not a value",
                    "say what to take for such: half of the limit, the limit, or a missing value (--limits "
                    "half|value|missing)",
                    self.rows(self.limits),
                )
            if how == "half":
                made[self.limits & self.like(UNDER)] /= 2
            elif how == "missing":
                made[self.limits] = np.nan
        return self.spread(made), decimal

    def _decimal(self, others: set[str]) -> str:
        """How decimals are separated. Raises Unclear where nothing tells, or both are there."""
        how = self.schema.decimal
        if how != "found":
            allowed = self._comma if how == "comma" else self._pointed
            if not allowed.all():
                raise Unclear(f"is no number with a decimal {how}", "correct it", self.rows(~allowed))
            return how
        if len(self.surely) > 1:
            raise Unclear(
                "has numbers with a decimal point and others with a decimal comma", "write all in one way in the file"
            )
        if self.surely:
            return next(iter(self.surely))
        unclear = self.like(EITHER_COMMA, self._bare)
        if len(others) == 1 and (unclear.any() or "comma" in others):
            return next(iter(others))
        if unclear.any():
            value = self.values[int(unclear.argmax())].as_py()
            raise Unclear(
                f"has {value!r}, which is {value.replace(',', '')} or {value.replace(',', '.')}",
                "say which: --decimal point (commas separate thousands) or --decimal comma",
                told="has numbers that may have a decimal comma or commas between thousands: --decimal point or comma",
            )
        return "point"

    def as_days(self) -> NDArray[np.float64]:
        """Rows as days since 1970. Raises Unclear for what is no date, and for days and months that may be either."""
        wrong = ~self.dates
        if wrong.any():
            raise Unclear("is no date, as the column's others are", "correct it or leave it empty", self.rows(wrong))
        texts = self.values
        mixed = self.like(DATE)
        if mixed.any():
            texts = self._iso(mixed)
        texts = pc.replace_substring_regex(texts, r"^(\d{4})/(\d{2})/(\d{2})", r"\1-\2-\3")
        try:
            zoned = self.like(r"(Z|[+-]\d{2}:?\d{2})$").any() and self.like(":").any()
            times = texts.cast(pa.timestamp("us", "UTC" if zoned else None))
        except pa.ArrowException:
            bad = np.array([not _is_time(text) for text in texts])
            raise Unclear("is no date that exists", "correct it or leave it empty", self.rows(bad)) from None
        micro = times.cast(pa.int64()).to_numpy(zero_copy_only=False)
        return self.spread(micro / (SECONDS_A_DAY * 1e6))

    def _iso(self, mixed: NDArray[np.bool_]) -> pa.Array:
        """The values, those with day and month in either order as ISO has them."""
        pairs = pc.extract_regex(self.values, r"^(?P<a>\d{1,2})[./-](?P<b>\d{1,2})[./-](?P<year>\d{4})$")
        first, second, year = (pc.struct_field(pairs, name) for name in ("a", "b", "year"))
        one, two = (pc.fill_null(each.cast(pa.int64()), 0).to_numpy(zero_copy_only=False) for each in (first, second))
        order = self.schema.date_order
        if order == "found":
            dotted = bool((mixed & self.like(r"\.")).any())
            day_first, month_first = bool((one[mixed] > 12).any()) or dotted, bool((two[mixed] > 12).any())
            if day_first == month_first:
                value = self.values[int(mixed.argmax())].as_py()
                what = "has dates with the day first and others with the month first"
                told = what if day_first else "has dates whose day and month may be either"
                shown = what if day_first else f"has dates like {value!r}, whose day and month may be either"
                raise Unclear(shown, "say which: --date-order day-first or month-first", told=told)
            order = "day-first" if day_first else "month-first"
        day, month = (first, second) if order == "day-first" else (second, first)
        day, month = (pc.utf8_lpad(each, 2, "0") for each in (day, month))
        return pc.if_else(
            pa.array(mixed),
            pc.binary_join_element_wise(year, month, day, pa.scalar("-", pa.large_string())),
            self.values,
        )


def as_days(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """A column of dates or times as days since 1970, NaN where there is none."""
    moments = column.cast(pa.timestamp("us"), safe=False) if pa.types.is_date(column.type) else column
    moments = pc.cast(moments, pa.timestamp("us", getattr(moments.type, "tz", None)), safe=False).cast(pa.int64())
    gone = pc.is_null(moments).to_numpy()
    whole = pc.fill_null(moments, 0).to_numpy() / (SECONDS_A_DAY * 1e6)
    made: NDArray[np.float64] = np.where(gone, np.nan, whole)
    return made


def plain(text: str) -> str:
    """A class or category as all tables have it: whole numbers without a point and zeros before them, `true` and
    `false` in small letters."""
    number = text.removeprefix("-")
    whole, _, rest = number.partition(".")
    if whole.isascii() and whole.isdigit() and (not rest or (rest.isascii() and rest.isdigit())):
        kept, rest = whole.lstrip("0") or "0", rest.rstrip("0")
        value = kept + ("." + rest if rest else "")
        return value if value == "0" or len(number) == len(text) else f"-{value}"
    return text.lower() if text.lower() in ("true", "false") else text


def is_number(text: str) -> bool:
    """Whether a text is a finite number with a point."""
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def _is_time(text: Any) -> bool:
    try:
        text.cast(pa.timestamp("us"))
    except pa.ArrowException:
        return False
    return True
