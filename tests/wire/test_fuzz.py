"""Frames that lie in any way end in FrameError, or hold a value of their class, and take little memory.

FEWBYTES_FUZZ is the number of frames for each kind of value (default 150; 20,000 takes about ten minutes);
`benchmarks/hardening/fuzz.py` has atheris look for more.
"""

from __future__ import annotations

import io
import os
import random
import tracemalloc
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tampering import LIMIT, accepted, tampered
from test_wire import ALL, assemble, cases, slow

from fewbytes.base.errors import UserError
from fewbytes.wire.inspect import inspect_frame

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


def test_inspect_tells_of_frames_that_lie_and_steers_no_terminal(tmp_path: Path) -> None:
    """Whatever a header holds: names that clear the screen, what no wire value writes, arrays in arrays."""
    rude, rng, pages = "\x1b[2J\x07[bold]w\u202e\r\n", random.Random(0), []
    known = {case.cls.__name__: case.cls for case in cases().values()}
    deep: list[object] = []
    for _ in range(400):
        deep = [deep]
    headers = [
        [rude, [[[[rude, "float32", [2]]], [[0]]]], []],
        ["Whole", [[[[rude, "float32", [2]]], [[0]]]], []],
        ["Part", [[[["w", "int8", [[rude]]]], [0, 0, 0, "n"], [0]]], []],
    ]
    frames = [
        assemble(None, None, header=msgspec.msgpack.encode(header))
        for header in [*headers, ["x", deep, []], ["Whole", deep, []]]
    ]
    frames += [tampered(name, rng.randbytes(20))[1] for name in cases() for _ in range(20)]
    for frame in frames:
        (tmp_path / "a.frame").write_bytes(frame)
        console = Console(file=io.StringIO(), markup=False, width=300)
        with suppress(UserError):  # not a frame
            console.print(inspect_frame(tmp_path / "a.frame", known))
        pages.append(console.file.getvalue())
    assert all("[2J [bold]w" in page for page in pages[:2])
    assert all(character.isprintable() or character == "\n" for page in pages for character in page)
