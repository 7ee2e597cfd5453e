"""Chosen values, packages of them, signs: what is lost when they are made, and in how few bytes they travel."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_wire import (
    DENSITIES,
    Case,
    Directions,
    Few,
    Parcel,
    assemble,
    bits,
    in_order,
    packets,
    round_trip,
    same,
    same_state,
    slow,
    take_apart,
)

from fewbytes.base.errors import MethodError
from fewbytes.base.state import State
from fewbytes.wire import Base, Counted, FrameError, Layout, Packages, Signs, TopK, counted, pack, unpack
from fewbytes.wire.fields import check_finite
from fewbytes.wire.schema import leaves_of
from fewbytes.wire.topk import largest

Packet = tuple[State, Layout | None, Base | None]


def chosen(size: int, k: int, seed: int = 0) -> torch.Tensor:
    """k random places."""
    return torch.from_numpy(np.sort(np.random.default_rng(seed).choice(size, k, replace=False)))


def binomial_bits(n: int, k: int) -> float:
    """log2 C(n, k)."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


@slow
@given(packets(torch.float32), st.sampled_from(DENSITIES), st.integers(0, 1 << 32), st.booleans())
def test_chosen_values_come_back_bit_for_bit(packet: Packet, density: float, seed: int, coded: bool) -> None:
    state, layout, base = packet
    places = {n: chosen(v.numel(), math.ceil(density * v.numel()), seed) for n, v in state.items()}
    sent = TopK.of(state, places)
    back = round_trip(Few(sent), layout=layout, base=base, coded=coded).model
    assert list(back.values) == in_order(state, layout)
    for name, value in back.dense().items():
        expected = torch.zeros(value.numel())
        expected[places[name]] = state[name].reshape(-1)[places[name]]
        kept = torch.zeros(value.numel(), dtype=torch.bool)
        kept[places[name]] = True
        assert bits(value.reshape(-1)[kept]) == bits(state[name].reshape(-1)[kept])
        assert not value.reshape(-1)[~kept].any()
    k = sum(len(p) for p in places.values())
    assert counted(back) == Counted(4 * k, 24 * k)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 255, 256, 1000])
def test_any_number_of_places(size: int) -> None:
    state = {"a": torch.arange(size).float()}
    for k in {0, 1, 2, size // 3, size // 2, size // 2 + 1, size - 1, size} - {size + 1}:
        for places in {0: chosen(size, min(k, size)), 1: torch.arange(size)[-k:] if k else torch.arange(0)}.values():
            for coded in (True, False):
                round_trip(Few(TopK.of(state, {"a": places})), layout=Layout.of(state), coded=coded)


@pytest.mark.parametrize("size", [30_000, 1_000_000])
@pytest.mark.parametrize("density", [0.0003, 0.001, 0.01, 1 / 32, 0.1, 0.2, 0.382, 0.5, 0.618, 0.9, 0.999])
def test_places_take_their_information(size: int, density: float) -> None:
    """Within 5 % of log2 C(d, k) bits, whatever the density, also of few places."""
    k = round(density * size)
    sent = Few(TopK.of({"a": torch.ones(size)}, {"a": chosen(size, k)}))
    stored = len(take_apart(bytes(pack(sent)))[2][0])
    assert binomial_bits(size, k) <= 8 * stored <= 1.05 * binomial_bits(size, k) + 8


def test_places_of_layers_that_differ_take_less_than_those_of_one_density() -> None:
    sizes = {"a": 300_000, "b": 300_000}
    places = {"a": chosen(300_000, 30_000), "b": chosen(300_000, 300)}
    sent = Few(TopK.of({name: torch.ones(n) for name, n in sizes.items()}, places))
    assert 8 * len(take_apart(bytes(pack(sent)))[2][0]) < 0.9 * binomial_bits(600_000, 30_300)


def test_the_largest_magnitudes() -> None:
    value = torch.tensor([[0.5, -3.0, 0.0], [2.0, -0.25, 1.0]])
    assert largest(value, 3).tolist() == [1, 3, 5]
    assert largest(value, 0).tolist() == []
    assert largest(value, 6).tolist() == list(range(6))
    assert torch.equal(TopK.of({"a": value}, {"a": largest(value, 6)}).dense()["a"], value)
    assert len(largest(torch.zeros(9), 4)) == 4  # ties: as many as asked for


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 16])
def test_places_of_whole_kernels(depth: int) -> None:
    state = {"c": torch.randn(4, 5, 3, 2), "e": torch.randn(2, 3, 0), "f": torch.randn(6, 7), "b": torch.randn(8)}
    sizes = {name: math.prod(value.shape[:depth]) for name, value in state.items()}
    places = {name: chosen(size, size // 3) for name, size in sizes.items()}
    for layout in (None, Layout.of(state)):
        back = round_trip(Few(TopK.of(state, places, depth)), layout=layout).model.dense()
        for name, value in back.items():
            shape = (sizes[name], math.prod(value.shape[depth:]))
            kept = state[name].reshape(shape)[places[name]]
            assert torch.equal(value.reshape(shape)[places[name]], kept)
            assert int((value != 0).sum()) == kept.numel()


# Six of a thousand places: gaps of 0, 0, 254, 254, 255 and 231. With a shift of 7 their lowest bits are 0, 0, 126, 126,
# 127 and 103, and 0, 0, 1, 1, 1 and 1 are left.
PLACES = [0, 1, 256, 511, 767, 999]
LOW = "000011001111001111001110001110001111001111"
RICE = LOW + "1101010101"


def stored(string: str) -> bytes:
    return np.packbits(np.array(list(string), int), bitorder="little").tobytes()


def test_places_are_coded_as_the_prose_says() -> None:
    entry = ["x", "float32", [8, 125]]
    for places, count in ((PLACES, 6), (sorted(set(range(1000)) - set(PLACES)), 994)):
        values = np.arange(count, dtype=np.float32)
        frame = assemble("Few", [[[entry], 16, [7, 7, count], [0]]], [stored(RICE), values.tobytes()])
        expected = TopK({"x": (8, 125)}, {"x": torch.tensor(places)}, {"x": torch.from_numpy(values)[:, None]})
        assert same(unpack(Few, frame), Few(expected))


@pytest.mark.parametrize(
    ("header", "section"),
    [
        ([7, 7, 5], stored(RICE)), ([7, 7, 7], stored(RICE)), ([7, 7, 0], stored(RICE)), ([7, 7, 1000], stored(RICE)),
        ([7, 7, 1001], stored(RICE)), ([7, 7, -6], stored(RICE)), ([7, 8, 6], stored(RICE)), ([7, 6, 6], stored(RICE)),
        ([7, 8, 6], stored(RICE) + b"\0"), ([8, 7, 6], stored(RICE)), ([9, 7, 6], stored(RICE)),
        ([6, 7, 6], stored(RICE)), ([-1, 7, 6], stored(RICE)), ([1 << 40, 7, 6], stored(RICE)),
        ([7, 0, 6], b""), ([7, -7, 6], stored(RICE)), ([7, 1 << 60, 6], stored(RICE)), ([7, 7], stored(RICE)),
        ([7, 7, 6, 0], stored(RICE)), ([7.0, 7, 6], stored(RICE)), ([7, 7, True], stored(RICE)),
        ([7, 7, 6], stored(LOW + "11010101001")), ([7, 7, 6], stored(LOW + "11010101011")),  # past the end; one more
        ([7, 8, 6], stored(RICE + "0" * 8)), ([7, 7, 6], stored(LOW + "1010101")),  # a byte too many, a place missing
        ([7, 7, 6], stored("1" + RICE[1:])), ([0, 126, 6], bytes(125) + b"\x3f"), ([0, 1, 3], b"\x0f"),
    ],
)  # fmt: skip
def test_malformed_places_are_refused(header: Any, section: bytes) -> None:
    """The right header is [7, 7, 6], with the section `RICE`."""
    for count in (0, 5, 6, 7, 994, 1000):
        sections = [section, bytes(4 * count)][: 1 + (count > 0)]
        Case(Few, b"").refuse(assemble("Few", [[[["x", "float32", [1000]]], 16, header, [0]]], sections))


@pytest.mark.parametrize("coded", [True, False])
def test_a_receiver_of_places_holds_no_more_than_its_limit(coded: bool) -> None:
    frame = bytes(pack(Few(TopK.of({"w": torch.ones(1000)}, {"w": chosen(1000, 90)})), coded=coded))
    limit = 1000 + 90 * (8 + 4) + 4 * 1000  # all places, those chosen with their values, and the dense values
    unpack(Few, frame, limit=limit)
    with pytest.raises(FrameError) as error:
        unpack(Few, frame, limit=limit - 1)
    assert error.value.code == "length"


# ---------------------------------------------------------------------------------------------------- packages


def parts_of(kernel: tuple[int, ...] = (3, 3)) -> Packages:
    state = {"c": torch.randn(2, 3, *kernel), "b": torch.randn(4)}
    return Packages(
        TopK.of(state, {"c": torch.tensor([3]), "b": torch.tensor([0, 2])}),
        TopK.of(state, {"c": torch.tensor([5])}, depth=2),
        TopK.of({"c": torch.rand(2, 3)}, {"c": torch.tensor([1, 4])}),
        torch.tensor([0b101, 7, 0]),
        torch.tensor([2, 0], dtype=torch.uint8),
    )


def test_packages_come_back() -> None:
    sent = parts_of()
    layout = Layout.of({"c": torch.zeros(2, 3, 3, 3), "b": torch.zeros(4)})
    for how in ({"layout": layout}, {"layout": Layout.of({"b": torch.zeros(4), "c": torch.zeros(2, 3, 3, 3)})}, {}):
        assert same_state(round_trip(Parcel(sent), **how).model.dense(), sent.dense())
    one, two = sent.magnitudes.values["c"].flatten().tolist()
    kernels = sent.dense()["c"].view(6, 9)
    assert kernels[1].tolist() == [-one] * 9
    assert kernels[4].tolist() == [two, -two, two, *[-two] * 6]


@pytest.mark.parametrize(
    "change",
    [
        {"which": torch.tensor([3, 0], dtype=torch.uint8)}, {"which": torch.tensor([0, 1, 0], dtype=torch.uint8)},
        {"patterns": torch.zeros(0, dtype=torch.int64)}, {"patterns": torch.zeros(257, dtype=torch.int64)},
        {"whole": TopK.of({"c": torch.ones(2, 3, 3, 3)}, {"c": torch.tensor([1])})},
        {"single": TopK.of({"c": torch.ones(2, 3, 3, 3)}, {"c": torch.tensor([1])}, depth=2)},
        {"single": TopK.of({"b": torch.ones(4)}, {"b": torch.tensor([1])})},
        {"whole": TopK.of({"b": torch.ones(4)}, {"b": torch.tensor([1])}, depth=2)},
        {"magnitudes": TopK.of({"c": torch.ones(2, 4)}, {"c": torch.tensor([1, 2])})},
        {"magnitudes": TopK.of({"b": torch.ones(2, 3)}, {"b": torch.tensor([1, 2])})},
        {"magnitudes": TopK.of({"c": torch.ones(2, 3).double()}, {"c": torch.tensor([1, 2])})},
    ],
    ids=str,
)  # fmt: skip
def test_packages_that_do_not_fit_each_other_are_refused(change: dict[str, Any]) -> None:
    frame = bytes(pack(Parcel(dataclasses.replace(parts_of(), **change))))
    assert Case(Parcel, b"").refuse(frame) in {"type", "layout", "coding", "header", "length"}


def test_patterns_of_kernels_too_long_for_them_are_refused() -> None:
    round_trip(Parcel(parts_of((2, 31))))
    Case(Parcel, b"").refuse(bytes(pack(Parcel(parts_of((7, 9))))))


# ---------------------------------------------------------------------------------------------------- signs


@slow
@given(packets(torch.float32), st.booleans())
def test_signs_come_back_bit_for_bit(packet: Packet, coded: bool) -> None:
    state, layout, base = packet
    sent = Signs.of(state)
    back = round_trip(Directions(sent), layout=layout, base=base, coded=coded).model
    assert list(back.signs) == in_order(state, layout)
    assert same_state(back.dense(), sent.dense())
    assert counted(back) == Counted(4, sum(v.numel() for v in state.values()))
    flat = torch.cat([torch.zeros(0), *(v.reshape(-1) for v in state.values())]).double()
    if flat.isfinite().all():
        mean = flat.abs().sum() / max(1, len(flat))
        torch.testing.assert_close(back.scale.double(), mean[None], rtol=1e-6, atol=1e-45)


def test_the_sign_of_zero_is_zero() -> None:
    value = torch.tensor([1.0, 0.0, -0.0, -2.0, 5e-324, -1e-40])
    sent = Signs.of({"a": value})
    assert sent.signs["a"].tolist() == [1, 0, 0, -1, 0, -1]
    assert sent.dense()["a"].tolist() == [0.5, 0.0, 0.0, -0.5, 0.0, -0.5]
    assert bits(sent.dense()["a"][1:3]) == bytes(8)
    assert Signs.of({"a": torch.zeros(3)}).dense()["a"].tolist() == [0, 0, 0]
    assert Signs.of({}).scale.tolist() == [0]


def test_signs_without_zeros_take_a_bit_each() -> None:
    value = {"a": torch.from_numpy(np.random.default_rng(0).standard_normal(100_000)).float()}
    assert len(pack(Directions(Signs.of(value)), layout=Layout.of(value))) <= 100_000 / 8 + 250


def test_signs_that_mostly_agree_take_their_entropy() -> None:
    value = {"a": torch.from_numpy(np.random.default_rng(0).standard_normal(1_000_000) + 2).float()}
    p = float((value["a"] > 0).double().mean())
    entropy = -1_000_000 * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 8
    assert len(pack(Directions(Signs.of(value)), layout=Layout.of(value))) <= 1.05 * entropy


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_visible(wrong: float) -> None:
    state = {"a": torch.tensor([1.0, wrong, 2.0]), "b": torch.ones(2)}
    for sent in (Directions(Signs.of(state)), Few(TopK.of(state, {"a": torch.tensor([1, 2])}))):
        with pytest.raises(FrameError, match="not all finite"):
            check_finite(leaves_of(sent))


@pytest.mark.parametrize(
    "field",
    [
        None, [], [True, [0, 0, 1, 3], [0, 0, 1, 2]], [True, [0, 0, 1, 3], [0, 0, 1, 2], [0], 0],
        [True, [0, 0, 1, 3], [0, 0, 1, 3], [0]], [True, [0, 0, 1, 2], [0, 0, 1, 2], [0]],
        [True, [0, 0, 1, 3], [0, 0, 1, 2], 0.5], [True, [0, 0, 1, 3], [0, 0, 1, 2], []],
        [[["w", "float64", [4]]], [0, 0, 1, 3], [0, 0, 1, 2], [0]],
    ],
)  # fmt: skip
def test_malformed_signs_are_refused(field: Any) -> None:
    layout = Layout.of({"w": torch.zeros(4)})
    sections = [b"\x0b", b"\x05", np.array([0.5], np.float32).tobytes()]
    case = Case(Directions, b"", layout)
    good = assemble("Directions", [[True, [0, 0, 1, 3], [0, 0, 1, 2], [0]]], sections, layout=layout.hash)
    assert unpack(Directions, good, layout=layout).model.dense()["w"].tolist() == [0.5, -0.5, 0, 0.5]
    case.refuse(assemble("Directions", [field], sections, layout=layout.hash))


@pytest.mark.parametrize("indices", [[2, 1], [1, 1]])
def test_indices_that_do_not_rise_are_refused(indices):
    with pytest.raises(MethodError, match=r"'w' .*rising"):
        TopK.of({"w": torch.ones(4)}, {"w": torch.tensor(indices)})
