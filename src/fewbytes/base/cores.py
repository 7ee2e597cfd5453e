"""Number of cores for torch: one in workers, so that they do not compete, and all on the server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def available_cores() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def all_cores() -> Iterator[None]:
    """Let torch use every core (at most OMP_NUM_THREADS), then restore the previous number."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(available_cores(), int(os.environ.get("OMP_NUM_THREADS") or available_cores())))
    try:
        yield
    finally:
        torch.set_num_threads(before)
