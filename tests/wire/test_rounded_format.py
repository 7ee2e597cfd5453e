"""Rounded numbers are stored as the format's prose says: ways, steps, and tables of frequencies."""

from __future__ import annotations

import decimal
import math
import struct

import pytest
import torch
from assembling import assemble, header_tree, take_apart
from test_wire import Case, Whole

from fewbytes.base.rate import Rate
from fewbytes.wire import Dense, Layout, Lossy, pack, unpack
from fewbytes.wire.frame import digest_of
from fewbytes.wire.levels import decode_levels, usual_table

STATE = {
    name: torch.randn(40, 30, generator=torch.manual_seed(k)) * 0.1**k
    for k, name in enumerate(["a", "b", "c", "d", "e"])
}
LAYOUT = Layout.of(STATE)


def rounded(bits: float = 1.0) -> bytes:
    return bytes(pack(Whole(Dense(STATE)), layout=LAYOUT, lossy=Lossy(Rate(bits))))


def refused(frame: bytes) -> str:
    return Case(Whole, b"", LAYOUT).refuse(frame)


def with_item(place: int, value: object) -> bytes:
    """The frame with another item of its rounded numbers."""
    kind, fields, sections, hashes = take_apart(rounded())
    fields[0][1][0][place] = value
    return assemble(kind, fields, sections, **hashes)


def test_ways_take_two_bits_each_and_the_step_is_a_float32() -> None:
    kind, ways, step, points, _, others = header_tree(rounded())[1][0][1][0]
    assert (kind, ways, others) == (6, bytes([0b01010101, 0b01]), [0])
    assert len(points) == 3
    value = struct.unpack("<f", struct.pack("<I", step))[0]
    back = unpack(Whole, rounded(), layout=LAYOUT).model.state["a"]
    ones = back[back > 0].min().item()  # the lowest level that is not 0
    assert math.isclose(ones, value * (1 + points[0] / 254), rel_tol=1e-5)


@pytest.mark.parametrize(
    "ways", [b"", b"\x55", bytes([0x55, 0x05]), bytes([0x55, 0x41]), bytes([0x55, 1, 0]), b"\1\1\1\1\1", 5, None]
)
def test_ways_that_do_not_fit_the_tensors_are_refused(ways: object) -> None:
    assert refused(with_item(1, ways)) in {"header", "coding"}


@pytest.mark.parametrize("step", [0, 1 << 31, 0x7F800000, 0x7FC00000, 0xBF800000, 1 << 32, -1, 0.5, True, None])
def test_steps_that_are_no_positive_number_are_refused(step: object) -> None:
    assert refused(with_item(2, step)) in {"header", "coding"}


def laplace(number: int, symbols: int) -> list[int]:
    """The usual frequencies of a class, by the prose, for symbols that are their own levels."""

    def reaching(level: int, scale: float) -> float:
        return math.exp(-(0.65 if level == 1 else level - 0.4) / scale) if level else 1.0

    wanted, low, high = max(2 ** (number / 2) - 2**-7, 1e-4), 1e-3, 1e3
    for _ in range(200):
        middle = math.sqrt(low * high)
        mean = sum(reaching(level, middle) for level in range(1, 4000))
        low, high = (middle, high) if mean < wanted else (low, middle)
    shares = [reaching(level, low) - reaching(level + 1, low) for level in range(symbols)]
    return [max(1, round(4096 * share / max(shares))) for share in shares]


@pytest.mark.parametrize("number", [-30, -14, -8, -3, 0, 2, 5])
def test_usual_tables_are_of_the_distribution_that_the_prose_names(number: int) -> None:
    for ours, theirs in zip(usual_table(number)[:12], laplace(number, 12), strict=True):
        assert abs(ours - theirs) <= 1 + 0.03 * theirs  # the scale is in 64ths of an octave


def test_usual_tables_do_not_depend_on_the_decimal_context() -> None:
    here = [usual_table.__wrapped__(number) for number in (-20, -5, 0, 9)]
    with decimal.localcontext(prec=5, rounding=decimal.ROUND_DOWN):
        assert [usual_table.__wrapped__(number) for number in (-20, -5, 0, 9)] == here


def test_tables_travel_where_they_save_bytes() -> None:
    assert header_tree(rounded(0.5))[1][0][1][0][4][4] is None
    even = {"w": (torch.arange(60_000) % 3 - 1).float()}  # far from any Laplace distribution
    frame = bytes(pack(Whole(Dense(even)), lossy=Lossy(Rate(step=1.0))))
    assert header_tree(frame)[1][0][1][0][4][4] is not None
    assert unpack(Whole, frame).model.state["w"].sign().equal(even["w"].sign())


def test_a_byte_of_a_table_is_a_power_of_the_21st_root_of_2() -> None:
    """One class of eight levels 0, 1, 2: the coder is given the frequencies of the prose."""
    import constriction
    import numpy as np

    stored = [255, 200, 3]
    frequencies = np.array([round(2 ** (12 + (n - 255) / 21)) for n in stored], np.float64)
    symbols = np.array([0, 1, 0, 0, 2, 0, 1, 0], np.int32)
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(symbols, constriction.stream.model.Categorical(frequencies, perfect=False))
    sections = iter(map(memoryview, [bytes([0]), bytes(stored), coder.get_compressed().tobytes(), b"\0", b""]))

    class Source:
        def section(self) -> memoryview:
            return next(sections)

    levels, _ = decode_levels(Source(), [0, 0, 3, [0], [0]], [(1, 1, 8)], [None])
    assert levels.tolist() == symbols.tolist()


def test_the_digest_is_the_end_of_a_frame_of_any_format() -> None:
    for major, length in ((2, 32), (3, 16)):
        frame = assemble("Whole", [[[], []]], major=major)
        assert digest_of(frame) == digest_of(memoryview(frame)) == frame[-length:]
