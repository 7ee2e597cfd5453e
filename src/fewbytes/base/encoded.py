"""The bytes of encoded messages beside those of plain ones, in words."""

from __future__ import annotations

from fewbytes.base.units import size, unit_of


def out_of(nbytes: int, plain: int) -> str:
    """Encoded bytes of plain ones, with both units if they differ: 34.1 kB of 1.99 MB, 1.20 of 1.99 MB."""
    encoded = size(nbytes).removesuffix(f" {unit_of([plain])}") if nbytes else "0"
    return f"{encoded} of {size(plain)}"
