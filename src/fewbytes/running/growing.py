"""Append-only files: each checkpoint names a prefix of them; the rest belongs to later rounds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blake3 import blake3

from fewbytes.base.errors import UserError


@dataclass
class Beginning:
    """A prefix of a file: its length in bytes, and its BLAKE3 digest."""

    size: int
    digest: bytes


class GrowingFile:
    """An append-only file that only its owner may read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hasher, self._size = blake3(), 0

    def grow(self, part: bytes) -> Beginning:
        """Append a part; returns the prefix with all parts so far."""
        with open(self.path, "ab", opener=partial(os.open, mode=0o600)) as file:
            file.truncate(self._size)  # what a run that was stopped left half-written
            file.write(part)
        self._hasher.update(part)
        self._size += len(part)
        return Beginning(self._size, self._hasher.digest())

    def read(self, beginning: Beginning) -> bytes:
        """The bytes of a prefix. Raises UserError if they are missing or damaged."""
        try:
            with open(self.path, "rb") as file:
                data = file.read(beginning.size)
        except OSError as error:
            if not beginning.size:
                return b""
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from None
        if blake3(data).digest() != beginning.digest:
            raise UserError(f"{self.path} is damaged")
        return data

    def restore(self, beginning: Beginning) -> bytes:
        """Continue from a prefix, and return its bytes. Raises UserError as `read`."""
        data = self.read(beginning)
        self._hasher, self._size = blake3(data), len(data)
        return data
