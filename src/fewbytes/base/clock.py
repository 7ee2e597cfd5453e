"""The wall clock, for people: what happened when. Nothing is decided by it but a site's hours."""

from __future__ import annotations

import time


def now() -> str:
    """The time in UTC, to the second, as in 2026-11-29T08:00:00Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def minute() -> int:
    """The local time, in minutes of the day."""
    there = time.localtime()
    return 60 * there.tm_hour + there.tm_min
