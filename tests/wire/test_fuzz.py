"""Frames that lie in any way end in FrameError, or hold a value of their class, and take little memory.

FEWBYTES_FUZZ is the number of frames for each kind of value (default 150; 20,000 takes about ten minutes);
`benchmarks/hardening/fuzz.py` has atheris look for more.
"""

from __future__ import annotations

import os
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tampering import LIMIT, accepted, tampered
from test_wire import ALL, cases, slow

COUNT = int(os.environ.get("FEWBYTES_FUZZ", "150"))


@ALL
def test_frames_that_lie_are_refused_or_hold_a_value(name: str) -> None:
    @settings(slow, max_examples=COUNT)
    @given(st.binary(max_size=120))
    def holds(data: bytes) -> None:
        accepted(*tampered(name, data))

    holds()


@pytest.mark.parametrize("seed", range(4))
def test_frames_that_lie_take_little_memory(seed: int) -> None:
    """Arrays, and what is made of them on the way; a sheet of images is of its own decoder's memory."""
    rng = random.Random(seed)
    for name in cases():
        for _ in range(10):
            case, frame = tampered(name, rng.randbytes(rng.randrange(120)))
            tracemalloc.start()
            case.outcome(frame, limit=LIMIT)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 4 * LIMIT


def test_some_of_the_frames_are_accepted_and_most_are_not() -> None:
    """Else the fuzzer would look at one end only."""
    rng = random.Random(0)
    outcomes = [accepted(*tampered(name, rng.randbytes(12))) for name in cases() for _ in range(40)]
    assert 0.02 < sum(outcomes) / len(outcomes) < 0.5
