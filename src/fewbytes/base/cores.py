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
    with _cores(min(available_cores(), int(os.environ.get("OMP_NUM_THREADS") or available_cores()))):
        yield


@contextmanager
def one_core() -> Iterator[None]:
    """Let torch use one core, so that results do not depend on their number, then restore the previous number."""
    with _cores(1):
        yield


@contextmanager
def _cores(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
