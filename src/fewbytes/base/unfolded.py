"""How much a file of somebody's may take in memory: what is packed well may be far more than it looks."""

from __future__ import annotations

from pathlib import Path

from fewbytes.base.errors import UserError

MOST_BYTES, MOST_TIMES = 1 << 30, 100
"""A file may unfold to so many bytes, or to so many times its own size, if that is more."""


def check_unfolded(path: Path, unfolded: int, what: str = "") -> None:
    """Raises UserError for a file that would be so many bytes in memory, if that is too much; `what` is said of it."""
    size = path.stat().st_size
    if unfolded > max(MOST_BYTES, MOST_TIMES * size):
        most = f"at most {MOST_TIMES} times the file, or {MOST_BYTES / 1e9:,.1f} GB"
        remedy = "split it, or write it without repetition"
        raise UserError(
            f"{path} is {size / 1e6:,.1f} MB and would be {unfolded / 1e9:,.1f} GB in memory ({what}{most}): {remedy}",
            public=f"a file would be far larger in memory than it is ({most}): {remedy}",
        )
