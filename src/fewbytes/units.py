"""Reads amounts of data, and rates of links, as people write them."""

from __future__ import annotations

import math
import re

from fewbytes.errors import UserError

UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "bit": 1 / 8, "kbit": 125.0, "Mbit": 125e3, "Gbit": 125e6}


def parse_bytes(text: str | float) -> int:
    """An amount in whole bytes: '200MB', '1.5 GB', '300000', 2e8. Raises UserError for less than one."""
    read = _amount(text if isinstance(text, str) else f"{text:f}", r"([0-9.]+)\s*([A-Za-z]*)")
    if not 1 <= read < math.inf:
        raise UserError(f"budget is an amount of data of a byte or more in B, kB, MB or GB, like 200MB, not {text!r}")
    return int(read)


def parse_rate(text: str) -> float:
    """A link's rate in bytes per second: '1MB/s', '10Mbit/s', '250kB/s'. Raises UserError."""
    rate = _amount(text, r"([0-9.]+)\s*([A-Za-z]+?)(?:/s|ps)?")
    if rate <= 0:
        raise UserError(f"cannot read the rate {text!r}: write it like 1MB/s, 250kB/s or 10Mbit/s")
    return rate


def _amount(text: str, pattern: str) -> float:
    """The number times the unit that the groups of `pattern` find, in bytes; 0 where they find none."""
    match = re.fullmatch(pattern, text.strip())
    unit = {name.lower(): size for name, size in UNITS.items()}.get(match[2].lower() or "b") if match else None
    try:
        return float(match[1]) * unit if match and unit else 0.0
    except ValueError:
        return 0.0
