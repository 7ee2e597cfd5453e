"""Limits on the memory that untrusted files take: well-compressed files may be far larger than they look."""

from __future__ import annotations

from pathlib import Path

from fewbytes.base.errors import UserError

MOST_BYTES, MOST_TIMES = 1 << 30, 100
"""A file may take this many bytes in memory, or this many times its own size, whichever is larger."""


def check_unfolded(path: Path, unfolded: int, what: str = "") -> None:
    """Raises UserError if a file would take too many bytes in memory; `what` describes its contents in the error."""
    size = path.stat().st_size
    if unfolded > max(MOST_BYTES, MOST_TIMES * size):
        most = f"at most {MOST_TIMES} times the file, or {MOST_BYTES / 1e9:,.1f} GB"
        remedy = "split it, or write it without repetition"
        raise UserError(
            f"{path} is {size / 1e6:,.1f} MB and would be {unfolded / 1e9:,.1f} GB in memory ({what}{most}): {remedy}",
            public=f"a file would be far larger in memory than it is ({most}): {remedy}",
        )
