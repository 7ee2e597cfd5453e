"""Rounded numbers are stored as the format's prose says: ways, steps, and tables of frequencies."""

from __future__ import annotations

import decimal
import math
import struct
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from assembling import assemble, header_tree, take_apart
from test_wire import Case, Whole

from fewbytes.base.rate import Rate
from fewbytes.wire import Base, Dense, FrameError, Layout, Lossy, pack, unpack
from fewbytes.wire.frame import digest_of
from fewbytes.wire.levels import USUAL_FROM, USUAL_TO, decode_levels, usual_table

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
    """The usual frequencies of a class, by the prose."""

    def reaching(level: int, scale: float) -> float:
        return math.exp(-(0.65 if level == 1 else level - 0.4) / scale) if level else 1.0

    wanted, low, high = 2 ** (min(number, 8) / 2) - 2**-7, 1e-3, 1e5
    for _ in range(100):
        middle = math.sqrt(low * high)
        # of a geometric series, from the second level on
        mean = reaching(1, middle) + reaching(2, middle) / (1 - math.exp(-1 / middle))
        low, high = (middle, high) if mean < wanted else (low, middle)
    scale = 2 ** (round(64 * math.log2(low)) / 64 + max(0, number - 8) / 2)
    lowest = [s if s < 16 else 8 + s % 8 << s // 8 - 1 for s in range(113)]
    shares = [reaching(n, scale) - reaching(after, scale) for n, after in pairwise(lowest)]
    return [max(1, round(4096 * share / max(shares))) for share in shares[:symbols]]


@pytest.mark.parametrize("number", range(-13, 25))
def test_usual_tables_are_of_the_distribution_that_the_prose_names(number: int) -> None:
    assert max(abs(a - b) for a, b in zip(usual_table(number), laplace(number, 112), strict=True)) <= 1
    assert usual_table(-14) == usual_table(-15) == usual_table(-100)


USUAL = "2a1a5f515657f76dfdef82c14db3ff56510e445c87fb3f6c30806119699aeeae"
"""SHA-256 of all usual tables, for classes from -100 to 100: a receiver needs those of its sender, to the bit."""


@pytest.mark.parametrize("before", ["", "decimal.setcontext(decimal.Context(prec=5, rounding=decimal.ROUND_DOWN))"])
def test_usual_tables_are_the_same_in_any_process(before: str) -> None:
    code = f"import decimal, hashlib; {before}\nfrom fewbytes.wire.levels import usual_tables\n"
    code += "print(hashlib.sha256(usual_tables(-100, 100, 112).astype('<u2').tobytes()).hexdigest())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout.strip() == USUAL


def test_usual_tables_do_not_depend_on_the_decimal_context() -> None:
    numbers = (-30, -14, -5, 0, 9, 32)
    here = [usual_table.__wrapped__(number) for number in numbers]
    with decimal.localcontext() as context:
        context.prec, context.rounding = 5, decimal.ROUND_DOWN
        assert [usual_table.__wrapped__(number) for number in numbers] == here
        usual_table.cache_clear()
        frame = rounded()
    assert frame == rounded()


def test_a_frame_makes_its_receiver_compute_no_more_tables_than_there_are() -> None:
    kind, fields, sections, hashes = take_apart(rounded(0.5))
    assert fields[0][1][0][4][4] is None
    fields[0][1][0][4][:2] = [-100, 100]
    usual_table.cache_clear()
    assert refused(assemble(kind, fields, sections, **hashes)) == "length"  # its levels are of other tables
    assert usual_table.cache_info().misses == USUAL_TO - USUAL_FROM + 1 == 71
    for same, others in ((USUAL_FROM, (-100, -50, -15)), (USUAL_TO, (57, 70, 100))):
        assert {usual_table.__wrapped__(number) for number in others} == {usual_table(same)}


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
        early = False

        def section(self) -> memoryview:
            return next(sections)

    levels, _ = decode_levels(Source(), [0, 0, 3, [0], [0]], [(1, 1, 8)], [None])
    assert levels.tolist() == symbols.tolist()


def levels_by_hand(levels: list[int], classes: list[int], tables: dict[int, list[int]]) -> list[bytes]:
    """The sections of symbols, signs (of those that are not 0 every third is negative) and low bits, by the prose."""
    import constriction
    import numpy as np

    spare = [max(0, n.bit_length() - 4) for n in levels]
    symbols = [n if n < 16 else 8 * s + (n >> s) for n, s in zip(levels, spare, strict=True)]
    coder = constriction.stream.stack.AnsCoder()
    for number in sorted(tables, reverse=True):  # what is coded last is decoded first
        here = np.array([s for s, k in zip(symbols, classes, strict=True) if k == number], np.int32)
        model = constriction.stream.model.Categorical(np.array(tables[number], np.float64), perfect=False)
        coder.encode_reverse(here, model)
    signs = [i % 3 == 0 for i, _ in enumerate(filter(None, levels))]
    low = [n >> bit & 1 for bit in range(12) for n, s in zip(levels, spare, strict=True) if s > bit]
    packed = [sum(1 << i for i, bit in enumerate(bits) if bit) for bits in (signs, low)]
    return [
        coder.get_compressed().astype("<u4").tobytes(),
        *(n.to_bytes((len(bits) + 7) // 8, "little") for n, bits in zip(packed, (signs, low), strict=True)),
    ]


@pytest.mark.parametrize("travel", [False, True])
def test_a_frame_of_rounded_numbers_is_what_the_prose_says(travel: bool) -> None:
    """Three output channels of 200 values each, whose classes are 0, 2 and 5; the lowest that is kept apart is 1."""
    at = range(600)
    sizes = (1, 2, 5)
    levels = [i * i % 7 * (i * 31 % 11) % (sizes[i // 200] * 5) for i in at]
    levels[17], levels[417], levels[599] = 37, 16, 60_000
    scales, classes = [2, -2, 0, 3], [(1, 2, 5)[i // 200] for i in at]
    most = 8 * 12 + (60_000 >> 12) + 1
    if travel:
        stored = {k: [200 - s if s < 30 else 1 + k * (s > 100) for s in range(most)] for k in range(1, 6)}
        tables = {k: [round(2 ** (12 + (n - 255) / 21)) for n in stored[k]] for k in stored}
    else:
        tables = {k: list(usual_table(k)[:most]) for k in range(1, 6)}
        assert max(abs(a - b) for k in tables for a, b in zip(tables[k], laplace(k, most), strict=True)) <= 1
    step, points = 0.125, [12, -30, 100]
    levelled = [1, 5, most, [0], [0] if travel else None]
    item = [6, b"\x01", struct.unpack("<I", struct.pack("<f", step))[0], points, levelled, [0]]
    entries = [["w", "float32", [3, 200]], ["exact", "float32", [2]]]
    sections = [struct.pack("4b", *scales)]
    sections += [b"".join(bytes(stored[k]) for k in sorted(stored))] if travel else []
    sections += [*levels_by_hand(levels, classes, tables), struct.pack("<ff", 0.1, -7)]
    state = unpack(Whole, assemble("Whole", [[entries, [item]]], sections)).model.state
    assert state["exact"].tolist() == torch.tensor([0.1, -7]).tolist()
    nonzero = iter(range(600))
    values = [
        0.0 if n == 0 else (-1 if next(nonzero) % 3 == 0 else 1) * step * (n + points[min(n, 3) - 1] / 254)
        for n in levels
    ]
    assert torch.allclose(state["w"].flatten(), torch.tensor(values), rtol=1e-6, atol=0)
    for k in range(len(sections) - 1):  # a section that is shorter or longer, and set bits after its end
        for wrong in (sections[k][:-1], sections[k] + b"\0", sections[k] + b"\x01"):
            refused_ = Case(Whole, b"").refuse(
                assemble("Whole", [[entries, [item]]], [*sections[:k], wrong, *sections[k + 1 :]])
            )
            assert refused_ in {"length", "padding", "coding"}


@pytest.mark.parametrize("tables", [[0], [1, [0]], [5], [1, [300]], 0, [], False, [[0]], "usual"])
def test_tables_that_are_none_are_refused(tables: object) -> None:
    kind, fields, sections, hashes = take_apart(rounded(0.5))
    assert fields[0][1][0][4][4] is None
    fields[0][1][0][4][4] = tables
    assert refused(assemble(kind, fields, sections, **hashes)) in {"header", "coding", "length", "base"}


def test_older_frames_have_tables_of_their_own() -> None:
    """In format 2, `null` is not a table, and ways are a byte each and the step is a float."""
    step = {3: 0x3F800000, 2: 1.0}
    ways = {3: b"\x01", 2: b"\x01"}
    frequencies = {3: bytes([255, 234]), 2: struct.pack("<HH", 4096, 2048)}
    levels = [0, 1, 0, 0, 1, 0, 0, 0]
    entries = [["w", "float32", [8]]]
    for major, code in ((3, 6), (2, 3)):
        sections = [b"\0", frequencies[major], *levels_by_hand(levels, [0] * 8, {0: [4096, 2048]})]
        item = [code, ways[major], step[major], [0, 0, 0], [0, 0, 2, [0], [0]], [0]]
        state = unpack(Whole, assemble("Whole", [[entries, [item]]], sections, major=major)).model.state
        assert state["w"].tolist() == [0, -1, 0, 0, 1, 0, 0, 0]
        none = [code, ways[major], step[major], [0, 0, 0], [0, 0, 2, [0], None], [0]]
        frame = assemble("Whole", [[entries, [none]]], [sections[0], *sections[2:]], major=major)
        if major == 2:
            assert Case(Whole, b"").refuse(frame) == "coding"
        for wrong in (step[5 - major], 0, 0.0, -1.0, math.nan, math.inf, None):
            item = [code, ways[major], wrong, [0, 0, 0], [0, 0, 2, [0], [0]], [0]]
            frame = assemble("Whole", [[entries, [item]]], sections, major=major)
            assert Case(Whole, b"").refuse(frame) in {"header", "coding"}


def test_codings_of_older_formats_are_refused_in_format_3() -> None:
    """What no sender of a format writes, its receiver does not decode: [2, flags] and [3, ways, …]."""
    base = Base(b"\x01" * 32, {"w": torch.ones(8)})
    differences = [[["w", "float32", [8]]], [[2, [2, 2, 2, 2]]]]  # all planes zeros: equal to the base
    levels = [0, 1, 0, 0, 1, 0, 0, 0]
    sections = [b"\0", struct.pack("<HH", 4096, 2048), *levels_by_hand(levels, [0] * 8, {0: [4096, 2048]})]
    rounded_before = [[["w", "float32", [8]]], [[3, b"\x01", 1.0, [0, 0, 0], [0, 0, 2, [0], [0]], [0]]]]
    for major in (1, 2, 3):
        for fields, rest, hashes, value in (
            (differences, [], {"base": base.digest[:16]}, [1] * 8),
            (rounded_before, sections, {}, [0, -1, 0, 0, 1, 0, 0, 0]),
        ):
            frame = assemble("Whole", [fields], rest, major=major, **hashes)
            if major == 3:
                with pytest.raises(FrameError) as error:
                    unpack(Whole, frame, base=base)
                assert error.value.code == "coding"
            else:
                assert unpack(Whole, frame, base=base).model.state["w"].tolist() == value


def test_the_digest_is_the_end_of_a_frame_of_any_format() -> None:
    for major, length in ((1, 32), (2, 32), (3, 16)):
        frame = assemble("Whole", [[[], []]], major=major)
        assert digest_of(frame) == digest_of(memoryview(frame)) == frame[-length:]
