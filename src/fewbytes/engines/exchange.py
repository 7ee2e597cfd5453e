"""Frames handed between processes, through files in shared memory."""

from __future__ import annotations

import mmap
import os

from fewbytes.base.files import ScratchFolder
from fewbytes.engines.frames import shared_memory
from fewbytes.wire import Frame


class Exchange:
    """Frames handed between processes through files in shared memory, mapped once and used again."""

    def __init__(self) -> None:
        self._folder = ScratchFolder("exchange", shared_memory())
        self._maps: dict[str, mmap.mmap] = {}
        self._spare: list[str] = []
        self._made = 0

    def new(self) -> str:
        """The name of an unused file."""
        if self._spare:
            return self._spare.pop()
        self._made += 1
        return f"{self._folder.path}/{self._made}"

    def free(self, name: str) -> None:
        """Return a name, for reuse by `new`."""
        self._spare.append(name)

    def write(self, name: str, frame: Frame) -> None:
        """Write a frame at the start of the file; allocates first, so that a full disk is an error, not a crash."""
        mapped = self._maps.get(name)
        if mapped is None or len(mapped) < len(frame):
            with open(name, "ab") as file:
                os.posix_fallocate(file.fileno(), 0, len(frame))
            mapped = self._map(name)
        frame.write_into(memoryview(mapped))

    def put(self, frame: Frame) -> str:
        """Write a frame into an unused file; returns its name."""
        name = self.new()
        self.write(name, frame)
        return name

    def read(self, name: str, length: int) -> memoryview:
        """The first `length` bytes of the file, valid until the file is written again."""
        mapped = self._maps.get(name)
        if mapped is None or len(mapped) < length:
            mapped = self._map(name)
        return memoryview(mapped)[:length]

    def _map(self, name: str) -> mmap.mmap:
        with open(name, "r+b") as file:
            self._maps[name] = mmap.mmap(file.fileno(), 0)
        return self._maps[name]

    def close(self) -> None:
        """Unmap the files and remove them."""
        self._maps.clear()
        self._folder.close()
