"""Lengths of time, written with units."""

from __future__ import annotations

import math
import re

from fewbytes.base.errors import UserError

LEAST, MOST = 0.01, 30 * 86400.0  # seconds
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str | float) -> float:
    """A length of time in seconds: '90', '30s', '10m', '1.5h', '1d'.

    Raises UserError for other texts, and for less than LEAST or more than MOST.

    >>> from fewbytes.base.durations import parse_seconds
    >>> parse_seconds("10m"), parse_seconds(1.5)
    (600.0, 1.5)
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(s|m|min|h|d|)\s*", str(text), re.ASCII)
    try:
        seconds = float(match[1]) * UNITS[match[2]] if match is not None else 0.0
    except ValueError:  # two decimal points
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UserError(f"cannot read the length of time {text!r}: write 30s, 10m, 1.5h or 1d")
    if not LEAST <= seconds <= MOST:
        raise UserError(f"the length of time {text!r} is not between {LEAST:g} s and {MOST / UNITS['d']:g} days")
    return seconds
