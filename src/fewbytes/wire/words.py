"""Codes in a frame's header, and descriptions of header items, which may raise anything for a damaged header."""

from __future__ import annotations

from typing import Any

RAW, PLANES, DIFFERENCES, ROUNDED, CHANGES = 0, 1, 2, 3, 4
"""Codings of numbers (`fewbytes.wire.coding`; ROUNDED: some of them are rounded, `fewbytes.wire.lossy`)."""
UNROUNDED, ITSELF, DIFFERENCE, ON_GRID = 0, 1, 2, 3
"""How a tensor among rounded numbers travels: unchanged, rounded, as a rounded difference, or as one on a grid."""
CODINGS = {
    RAW: "raw", PLANES: "planes", DIFFERENCES: "difference to the base", CHANGES: "changes from the base"
}  # fmt: skip
SHOWN = 40  # maximum number of entries listed


def named(header: Any) -> list[str]:
    """Named tensors, as `Writer.state` writes them."""
    listed, groups = header
    return [*entries(listed), *(f"values: {numbers(group)}" for group in groups)]


def entries(header: Any) -> list[str]:
    """The entries that travel."""
    if header is True:
        return ["all entries of the model"]
    if isinstance(header, bytes):
        return [f"{sum(byte.bit_count() for byte in header)} of the model's entries"]
    listed = [
        f"{f'{name}: ' if name else ''}{dtype} {'x'.join(map(str, shape)) or 'scalar'}" for name, dtype, shape in header
    ]
    more = [f"… and {len(listed) - SHOWN} more"] if len(listed) > SHOWN else []
    return listed[:SHOWN] + more or ["no entries"]


def mask(header: Any) -> str:
    """A coding of a mask."""
    kind, flag, length, ones = header
    names = ("packed bits", "run lengths before ones", "run lengths before zeros")
    return f"mask of {ones:,} ones as {names[kind]}, {length:,} bytes" + (" before zstandard" if flag else "")


def places(header: Any) -> str:
    """A coding of places."""
    if len(header) == 3:
        _, length, count = header
        return f"places of {count:,} in Rice's code, {length:,} bytes"
    return f"places of {header[3]:,}: {mask(header)}"


def numbers(header: Any) -> str:
    """A coding of numbers."""
    kind, *rest = header
    if kind == ROUNDED:
        ways, step, _, _, exact = rest
        parts = [f"{len(ways) - ways.count(UNROUNDED)} of {len(ways)} tensors in steps of {step:.3g}"]
        parts += [f"{ways.count(DIFFERENCE)} as differences to the base"] if DIFFERENCE in ways else []
        return f"rounded: {', '.join(parts)}" + (f"; the others: {numbers(exact)}" if UNROUNDED in ways else "")
    how = CODINGS[kind] + (f", a {mask(rest[0])}" if len(rest) == 2 else "")
    flags = rest[-1] if rest else []
    return how + (f" ({', '.join('zstandard' if flag else 'raw' for flag in flags)}; lowest first)" if rest else "")
