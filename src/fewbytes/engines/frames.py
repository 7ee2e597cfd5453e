"""Frames in shared memory, for processes of one machine: a message then carries only the frames' names."""

from __future__ import annotations

import mmap
import os
import re
import uuid
from pathlib import Path
from typing import Protocol

from fewbytes.base.errors import FrameError
from fewbytes.wire import Frame

SHARED = Path("/dev/shm")
ROOM = 1 << 30  # bytes that must be free there
NAME = re.compile(r"[0-9a-f]{32}")


def shared_memory() -> Path | None:
    """A folder in this machine's shared memory, if it has room."""
    if not (SHARED.is_dir() and os.access(SHARED, os.W_OK)):
        return None
    status = os.statvfs(SHARED)
    return SHARED if status.f_bavail * status.f_frsize > ROOM else None


class FramePlace(Protocol):
    """A place where two processes exchange frames by name."""

    def put(self, frame: Frame | bytes) -> str:
        """Store a frame; returns its name."""

    def get(self, name: str) -> memoryview:
        """A stored frame, as a view that outlives its name. Raises FrameError if there is none."""


class FrameFolder:
    """A folder of frames by name, for all processes that know the folder. Names from outside are checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, frame: Frame | bytes | memoryview) -> str:
        """Store a frame; returns its name."""
        name = uuid.uuid4().hex
        with open(self.folder / name, "wb") as file:
            for part in frame.parts if isinstance(frame, Frame) else [frame]:
                file.write(part)
        return name

    def get(self, name: str) -> memoryview:
        """A stored frame, as a view that outlives its name. Raises FrameError if there is none."""
        try:
            with open(self._path(name), "rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError):
            raise FrameError("truncated", "the frame that the message names no longer exists") from None

    def remove(self, name: str) -> None:
        """Remove a frame."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise FrameError("header", "a frame's name is malformed")
        return self.folder / name
