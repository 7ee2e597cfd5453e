"""Randomness by name: a generator for (seed, who, when, what), whatever ran before it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def stream_seed(seed: int, *names: int | str) -> int:
    """A 63-bit seed for the named stream."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def stream(seed: int, *names: int | str) -> np.random.Generator:
    """The named stream's generator: no engine, worker count or resumption shifts it."""
    return np.random.default_rng(stream_seed(seed, *names))


def seed_torch(seed: int) -> None:
    """Seed torch's global generators, those of GPUs where this process has opened any.

    torch.manual_seed would walk the call stack where none is open, and asking whether there are any keeps the processes
    that are forked from this one from opening theirs.
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
    """Whatever is drawn in the block, the global generators of torch, Python and numpy are then as before, and those of
    GPUs, where this process uses any."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def seeded(seed: int, *names: int | str) -> Iterator[None]:
    """What is drawn in the block comes from the named stream; all global generators are then as before."""
    with untouched():
        seed_all(stream_seed(seed, *names))
        yield
