"""Parses dates: ISO, day and month in either order, names of months, and whole numbers like 20200131."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fewbytes.data.schema import Unclear

SECONDS_A_DAY = 86_400
MONTHS = ("jan", "feb", "mar|mär|mrz", "apr", "may|mai", "jun", "jul", "aug", "sep", "oct|okt", "nov", "dec|dez")
"""The beginnings of month names, in English and in German."""

_TIME = r"(?P<time>[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?)?"
_NAME = rf"(?P<name>{'|'.join(MONTHS)})[a-zä]*\.?"
ISO = r"^\d{4}[-/]\d{2}[-/]\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:?\d{2})?)?$"
MIXED = rf"^(?P<a>\d{{1,2}})[./-](?P<b>\d{{1,2}})[./-](?P<year>\d{{4}}){_TIME}$"
DAY_NAMED = rf"(?i)^(?P<day>\d{{1,2}})\.?[ /-]?{_NAME},?[ /-]?(?P<year>\d{{4}}){_TIME}$"
NAMED_DAY = rf"(?i)^{_NAME} (?P<day>\d{{1,2}})(?:st|nd|rd|th)?,? (?P<year>\d{{4}}){_TIME}$"
WHOLE = r"^(19|20)\d{2}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])$"
OTHERWISE = r"(?i)^\d{1,2}[./ -](\d{1,2}|[a-zä]{3,9}\.?)[./ -](\d{2}|\d{4})([ ,T].*)?$"
"""Texts that look like a date: without a century, or with a time in another notation."""


def are_dates(values: pa.Array) -> NDArray[np.bool_]:
    """Which texts are dates; whole numbers only if all of them are."""
    whole = _like(values, WHOLE)
    if len(whole) and whole.all():
        return whole
    return _like(values, ISO) | _like(values, MIXED) | _like(values, DAY_NAMED) | _like(values, NAMED_DAY)


def days_of(values: pa.Array, order: str) -> NDArray[np.float64]:
    """Dates as days since 1970; `order` of day and month: "found", "day-first" or "month-first". Raises Unclear for
    a nonexistent date, and for an ambiguous order."""
    texts = pc.replace_substring_regex(values, r"^(\d{4})/?(\d{2})/?(\d{2})", r"\1-\2-\3")
    for pattern in (DAY_NAMED, NAMED_DAY):
        if (which := _like(values, pattern)).any():
            parts = pc.extract_regex(values, pattern)
            begun = pc.utf8_slice_codeunits(pc.utf8_lower(pc.struct_field(parts, "name")), 0, 3)
            named = [(name, f"{i:02}") for i, names in enumerate(MONTHS, 1) for name in names.split("|")]
            place = pc.index_in(begun, pa.array([name for name, _ in named], begun.type))
            month = pa.array([number for _, number in named], pa.large_string()).take(place)
            texts = pc.if_else(pa.array(which), _iso(parts, month, pc.struct_field(parts, "day")), texts)
    if (mixed := _like(values, MIXED)).any():
        parts = pc.extract_regex(values, MIXED)
        first, second = (pc.struct_field(parts, name) for name in ("a", "b"))
        day_first = _day_first(values.filter(pa.array(mixed)), order)
        month, day = (second, first) if day_first else (first, second)
        texts = pc.if_else(pa.array(mixed), _iso(parts, month, day), texts)
    zoned = _like(values, r":.*(Z|[+-]\d{2}:?\d{2})$").any()
    try:
        times = texts.cast(pa.timestamp("us", "UTC" if zoned else None))
    except pa.ArrowException:
        bad = np.array([not _is_time(text) for text in texts])
        raise Unclear("is a date that does not exist", "correct it or leave it empty", bad) from None
    micro: NDArray[np.int64] = times.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return micro / (SECONDS_A_DAY * 1e6)


def days_of_numbers(values: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Numbers like 20200131 as days since 1970, NaN for NaN; None unless all are dates from 1900 to 2099."""
    low, high = (np.fmin.reduce(values), np.fmax.reduce(values)) if len(values) else (0, 0)
    if not 19000101 <= low <= high <= 20991231:
        return None
    missing = np.isnan(values)
    whole = np.where(missing, 19700101, values)
    if (whole != np.floor(whole)).any():
        return None
    year, month, day = (part.astype(np.int64) for part in (whole // 10000, whole // 100 % 100, whole % 100))
    months = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
    days = months.astype("datetime64[D]") + (day - 1)
    real = (month >= 1) & (month <= 12) & (day >= 1) & (days.astype("datetime64[M]") == months)
    return np.where(missing, np.nan, days.astype(np.int64).astype(np.float64)) if real.all() else None


def days_of_times(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """A column of dates or times as days since 1970, NaN without a value."""
    moments = column.cast(pa.timestamp("us"), safe=False) if pa.types.is_date(column.type) else column
    moments = pc.cast(moments, pa.timestamp("us", getattr(moments.type, "tz", None)), safe=False).cast(pa.int64())
    missing = pc.is_null(moments).to_numpy()
    whole = pc.fill_null(moments, 0).to_numpy() / (SECONDS_A_DAY * 1e6)
    days: NDArray[np.float64] = np.where(missing, np.nan, whole)
    return days


def written(days: float) -> str:
    """Days since 1970 in ISO format, with the time unless it is midnight."""
    moment = np.datetime64(round(days * SECONDS_A_DAY), "s")
    return str(moment.astype("datetime64[D]") if days == np.floor(days) else moment)


def _day_first(values: pa.Array, order: str) -> bool:
    """Whether the day precedes the month in numeric dates. Raises Unclear if that is ambiguous."""
    if order != "found":
        return order == "day-first"
    parts = pc.extract_regex(values, MIXED)
    one, two = (pc.struct_field(parts, name).cast(pa.int64()).to_numpy(zero_copy_only=False) for name in ("a", "b"))
    day_first = bool((one > 12).any()) or bool(_like(values, r"^\d+\.\d+\.").any())
    if day_first != bool((two > 12).any()):
        return day_first
    what = "has dates with the day first and others with the month first"
    public = what if day_first else "has dates whose day and month may be either"
    shown = what if day_first else f"has dates like {values[0].as_py()!r}, whose day and month may be either"
    raise Unclear(shown, "choose --date-order day-first or month-first", public=public)


def _iso(parts: pa.Array, month: pa.Array, day: pa.Array) -> pa.Array:
    """Years, months, days and the following times in ISO format."""
    month, day = (pc.utf8_lpad(each, 2, "0") for each in (month, day))
    dash = pa.scalar("-", pa.large_string())
    date = pc.binary_join_element_wise(pc.struct_field(parts, "year"), month, day, dash)
    return pc.binary_join_element_wise(date, pc.struct_field(parts, "time"), pa.scalar("", pa.large_string()))


def _like(values: pa.Array, pattern: str) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = pc.match_substring_regex(values, pattern).to_numpy(zero_copy_only=False)
    return found


def _is_time(text: pa.Scalar) -> bool:
    try:
        text.cast(pa.timestamp("us"))
    except pa.ArrowException:
        return False
    return True
