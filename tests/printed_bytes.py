"""Reads the bytes that a line of a log states."""

from __future__ import annotations

import re

from fewbytes.base.units import parse_bytes


def out_of(line: str) -> list[tuple[int, int]]:
    """Each encoded and plain size of a line: 34.1 kB of 1.99 MB, 1.20 of 1.99 MB."""
    found = re.findall(r"([\d.]+)( [kMGT]?B)? of ([\d.]+)( [kMGT]?B)", line)
    return [(parse_bytes(some + (unit or of)), parse_bytes(whole + of)) for some, unit, whole, of in found]
