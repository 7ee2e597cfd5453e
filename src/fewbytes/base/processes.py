"""Identities of processes: an id alone may be another process's by now."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

Process = tuple[int, str]
"""Its id, and when it started (empty where there is no /proc): another that gets the id later is another."""


def this_process() -> Process:
    """The calling process."""
    return os.getpid(), started(Path(f"/proc/{os.getpid()}/stat"))[0]


def is_alive(process: Process) -> bool:
    """Whether that very process runs; one that has ended and was not waited for does not."""
    pid, since = process
    if since:
        return started(Path(f"/proc/{pid}/stat"))[0] == since
    with suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


def started(stat: Path) -> tuple[str, int]:
    """From a process's stat file: its start in ticks since boot, and its parent's id; "" and 0 if it has ended."""
    with suppress(OSError):
        state, parent, *fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        if state not in "ZX":
            return fields[17], int(parent)
    return "", 0
