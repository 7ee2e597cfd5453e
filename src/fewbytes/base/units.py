"""Human-readable amounts of data and link rates (B: byte, b: bit, k: 1000, Ki: 1024), lists of clients, and scores."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from fewbytes.base.errors import UserError

PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1}
NUMBER = r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*(?:((?i:[kmgt]i?)?)"


def parse_bytes(text: str | float) -> int:
    """An amount in whole bytes: '200MB', '1.5 GiB', '800Mbit', '300000', 2e8.

    Raises UserError for less than one, and for '200Mb', which is ambiguous between bits and bytes.
    """
    read = _amount(text if isinstance(text, str) else f"{text:f}", NUMBER + r"(B|(?i:bytes?|bits?)))?")
    if not 1 <= read < math.inf or (isinstance(text, float) and not text.is_integer()):
        raise UserError(
            "budget is an amount of data of a byte or more, like 200MB, 300kB, 1.5GiB or, in bits, 800Mbit "
            f"(Mb might be either), not {text!r}"
        )
    return int(read)


def size(count: float) -> str:
    """Bytes with three significant digits, in the unit that suits them: 14.4 kB, 1.60 MB."""
    return f"{in_unit(count, unit := unit_of([count]))} {unit}"


def moved(up: int, down: int) -> str:
    """Bytes in both directions, and in each: 36.0 MB (12.0 up, 24.0 down), 1.60 MB (923 kB up, 677 kB down)."""
    unit = unit_of([up + down])
    ways = [size(count).removesuffix(f" {unit}") if count else "0" for count in (up, down)]
    return f"{in_unit(up + down, unit)} {unit} ({ways[0]} up, {ways[1]} down)"


def unit_of(counts: Iterable[float | None]) -> str:
    """One unit for these bytes: the largest in which none but 0 is below 1, or the most of them is 1000 or more."""
    these = [count for count in counts if count] or [10**6]
    return next((u for u, factor in UNITS.items() if min(these) >= factor or max(these) >= 1000 * factor), "B")


def in_unit(count: float | None, unit: str) -> str:
    """Bytes with three significant digits, all digits before the point, and no unit; a dash for None."""
    if not count:
        return "—" if count is None else "0"
    value = count / UNITS[unit]
    return f"{value:,.{0 if unit == 'B' else max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def megabytes(count: float | None) -> str:
    """Bytes as megabytes (10^6), like `in_unit`."""
    return in_unit(count, "MB")


def parse_rate(text: str) -> float:
    """A link's rate in bytes per second: '1MB/s', '2MiB/s', '10Mbit/s', '10Mb/s', '10Mbps'. Raises UserError."""
    rate = _amount(text, NUMBER + r"(B|b|(?i:bytes?|bits?)))(?i:\s*/\s*s(?:ec)?|ps)?")
    if not 0 < rate < math.inf:
        raise UserError(
            f"cannot read the rate {text!r}: write bytes like 1MB/s, 250kBps or 1MiB/s (upper-case B), "
            "or bits like 10Mbit/s, 10Mb/s or 10Mbps (lower-case b)"
        )
    return rate


def _amount(text: str, pattern: str) -> float:
    """The number times prefix and unit, in bytes, from the groups of `pattern`; 0 if it does not match."""
    match = re.fullmatch(pattern, text.strip(), re.ASCII)
    if match is None:
        return 0.0
    number, prefix, unit = match[1], match[2] or "", match[3] or "B"
    return float(number) * PREFIXES[prefix.lower()] / (8 if unit == "b" or unit.lower().startswith("bit") else 1)


def plain(value: float) -> str:
    """A number as short text that reads back as the same number: 8, 0.5, 1e-05."""
    return repr(float(value)).removesuffix(".0")


def written(value: float | None, share: bool) -> str:
    """A score as text: a share in per cent with one decimal, else with four digits; a dash for None."""
    if value is None:
        return "—"
    return f"{100 * value:.1f}%" if share else f"{value:.4g}"


def listed(clients: Iterable[int]) -> str:
    """A compact list of clients: '3, 7, 10 to 59'."""
    these = set(clients)
    spans = zip(
        sorted(i for i in these if i - 1 not in these), sorted(i for i in these if i + 1 not in these), strict=True
    )
    return ", ".join(str(a) if a == b else f"{a} to {b}" if b > a + 1 else f"{a}, {b}" for a, b in spans)
