"""Files with clients' local training as it goes, so that a killed process continues inside it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from fewbytes.base.errors import FrameError
from fewbytes.base.files import replacing
from fewbytes.base.state import State, copied
from fewbytes.core.training import Position, Saving, Snapshot
from fewbytes.wire import Parsed, pack_state, unpack_state

SUFFIX = ".training"


@dataclass
class FileSaves:
    """Where a client's trainings for one handler in one round are saved: one file each, every `every` seconds."""

    folder: Path
    name: str
    every: float
    count: int = 0

    def next(self, start: Iterable[Tensor], about: str) -> Saving:
        """For the handler's next training, which begins from these tensors and the global generators, with terms
        `about`."""
        self.count += 1
        digest = blake3(f"{self.name} {self.count} {about}".encode())
        for value in (*start, torch.get_rng_state()):
            digest.update(copied(value).reshape(-1).view(torch.uint8).numpy().tobytes())
        return FileSaving(self.folder / f"{self.name}-{self.count}{SUFFIX}", self.every, digest.digest())

    def clear(self) -> None:
        """Remove the files, after the handler has returned."""
        for path in self.folder.glob(f"{self.name}-*{SUFFIX}"):
            path.unlink(missing_ok=True)


class FileSaving:
    """The saved state of one training, in a file."""

    def __init__(self, path: Path, every: float, key: bytes) -> None:
        self._path, self._every, self._key = path, every, key
        self._saved = time.monotonic()

    def resumed(self) -> Snapshot | None:
        """The state to continue from; None if there is none of this training, or the file is damaged."""
        with suppress(OSError, FrameError):
            found = unpack_state(Snapshot, Parsed(self._path.read_bytes(), None))
            return found if found.key == self._key else None
        return None

    @property
    def due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self._saved >= self._every

    def save(self, model: State, memory: State, at: Position) -> None:
        """Write the state under a temporary name, then rename it."""
        with replacing(self._path) as file:
            for part in pack_state(Snapshot(self._key, model, memory, at)).parts:
                file.write(part)
        self._saved = time.monotonic()
