"""How a run is asked to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminating(stop: threading.Event | None = None) -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C; with `stop`, the first of either only sets it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        if stop is None or stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    kinds = [signal.SIGTERM] if stop is None else [signal.SIGTERM, signal.SIGINT]
    before = [signal.signal(kind, interrupt) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
