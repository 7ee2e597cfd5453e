"""Named randomness: a generator for (seed, client, round, purpose), independent of what ran before; and the global
generators' states."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def stream_seed(seed: int, *names: int | str) -> int:
    """A 63-bit seed for the named stream."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def stream(seed: int, *names: int | str) -> np.random.Generator:
    """The named stream's generator: independent of engine, number of workers and resuming."""
    return np.random.default_rng(stream_seed(seed, *names))


def seed_torch(seed: int) -> None:
    """Seed torch's global generators, and those of GPUs if this process uses any.

    Without an open GPU, torch.manual_seed would walk the call stack; and querying for GPUs here would keep forked child
    processes from using theirs.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_all(seed: int) -> None:
    """Seed the global generators of torch, Python and numpy."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def untouched() -> Iterator[None]:
    """Restore the global generators of torch, Python and numpy after the block, and those of GPUs if this process uses
    any."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@dataclass
class Generators:
    """The states of the global generators: torch's by device, and those of Python and numpy as JSON."""

    torch: dict[str, Tensor]
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


@contextmanager
def seeded(seed: int, *names: int | str) -> Iterator[None]:
    """Draw from the named stream inside the block; restore all global generators afterwards."""
    with untouched():
        seed_all(stream_seed(seed, *names))
        yield
