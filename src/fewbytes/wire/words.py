"""Codes in a frame's header, and descriptions of header items, which may raise anything for a damaged header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

RAW, PLANES, DIFFERENCES, ROUNDED_BEFORE, CHANGES, EQUAL, ROUNDED = 0, 1, 2, 3, 4, 5, 6
"""Codings of numbers (`fewbytes.wire.coding`; ROUNDED: some of them are rounded, `fewbytes.wire.lossy`). Only read:
DIFFERENCES, of format 1, and ROUNDED_BEFORE."""
UNROUNDED, ITSELF, DIFFERENCE, ON_GRID = 0, 1, 2, 3
"""How a tensor among rounded numbers travels: unchanged, rounded, as a rounded difference, or as one on a grid."""
CODINGS = {
    RAW: "raw", PLANES: "planes", DIFFERENCES: "difference to the base", CHANGES: "changes from the base",
    EQUAL: "equal to the base",
}  # fmt: skip
CONSTANT = 2
"""A plane's flag from which on all its bytes are the flag less this."""
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
    if kind in (ROUNDED, ROUNDED_BEFORE):
        ways, step, _, _, exact = rest
        if kind == ROUNDED:
            ways, step = unpacked_ways(ways), step_of(step)
        rounded, different = sum(way != UNROUNDED for way in ways), sum(way > ITSELF for way in ways)
        parts = [f"{rounded} tensors in steps of {step:.3g}"]
        parts += [f"{different} as differences to the base"] if different else []
        return f"rounded: {', '.join(parts)}" + ("" if exact == [RAW] else f"; the others: {numbers(exact)}")
    how = CODINGS[kind] + (f", a {mask(rest[0])}" if len(rest) == 2 else "")
    flags = rest[-1] if rest else []
    return how + (f" ({', '.join(plane(flag) for flag in flags)}; lowest first)" if rest else "")


def plane(flag: int) -> str:
    """How a plane of numbers is stored."""
    return ("raw", "zstandard")[flag] if flag < CONSTANT else "constant"


def packed_ways(ways: Sequence[int]) -> bytes:
    """How tensors travel, two bits each, the lowest first."""
    padded = np.array([*ways, *[0] * (-len(ways) % 4)], np.uint8).reshape(-1, 4)
    return bytes((padded << np.array([0, 2, 4, 6], np.uint8)).sum(1, dtype=np.uint8))


def unpacked_ways(data: bytes) -> bytes:
    """Undo `packed_ways`, with up to three zeros more."""
    return bytes((np.frombuffer(data, np.uint8)[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1))


def bits_of_step(step: float) -> int:
    """A step, a float32 number, as the integer of the same bits."""
    return int(np.float32(step).view(np.uint32))


def step_of(bits: int) -> float:
    """Undo `bits_of_step`."""
    return float(np.uint32(bits).view(np.float32))
