"""Local training that is saved as it goes, so that a killed process continues inside it, bit for bit."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from fewbytes.base.errors import FrameError
from fewbytes.base.files import replacing
from fewbytes.base.state import State, copied
from fewbytes.wire import Parsed, pack_state, unpack_state

SUFFIX = ".training"


@dataclass
class Generators:
    """The states of the global generators: torch's by device, and those of Python and numpy as JSON."""

    torch: State
    others: str

    @classmethod
    def now(cls) -> Generators:
        """Their current states."""
        version, numbers, gauss = random.getstate()
        numpy: dict[str, Any] = np.random.get_state(legacy=False)
        state = numpy["state"]
        others = {
            "python": [version, list(numbers), gauss],
            "numpy": [state["key"].tolist(), int(state["pos"]), int(numpy["has_gauss"]), float(numpy["gauss"])],
        }
        drawn = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            drawn |= {f"cuda:{i}": value for i, value in enumerate(torch.cuda.get_rng_state_all())}
        return cls(drawn, json.dumps(others))

    def restore(self) -> None:
        """Set them to these states."""
        others = json.loads(self.others)
        version, numbers, gauss = others["python"]
        random.setstate((version, tuple(numbers), gauss))
        key, pos, has_gauss, drawn = others["numpy"]
        np.random.set_state(("MT19937", np.array(key, np.uint32), pos, has_gauss, drawn))
        torch.set_rng_state(self.torch["cpu"])
        for name, state in self.torch.items():
            if name != "cpu":
                torch.cuda.set_rng_state(state, name)


@dataclass
class Position:
    """Where a training is: whole epochs, batches of the current one, its order of samples (empty: as stored), and its
    loss so far."""

    epoch: int
    batch: int
    order: Tensor
    total: Tensor


@dataclass
class Snapshot:
    """All that a training needs to continue. `key`: of the training, as `Saving.of` makes it."""

    key: bytes
    model: State
    memory: State  # the optimiser's
    at: Position
    generators: Generators = field(default_factory=Generators.now)


@dataclass
class Saves:
    """Where a client's trainings for one handler in one round are saved, a file each, every so many seconds."""

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
        return Saving(self.folder / f"{self.name}-{self.count}{SUFFIX}", self.every, digest.digest())

    def clear(self) -> None:
        """Remove the files, after the handler has returned."""
        for path in self.folder.glob(f"{self.name}-*{SUFFIX}"):
            path.unlink(missing_ok=True)


class Saving:
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
