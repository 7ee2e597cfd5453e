"""Quantised values and bits: what is lost when they are made, and in how few bytes they travel bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_wire import (
    DENSITIES,
    NAMES,
    SHAPES,
    Case,
    Choice,
    Rounded,
    assemble,
    cases,
    in_order,
    round_trip,
    same_state,
    slow,
)

from fewbytes.base.state import State
from fewbytes.wire import Bits, Counted, Layout, Quantised, base_of, counted, pack, unpack
from fewbytes.wire.fields import check_finite
from fewbytes.wire.quantised import dequantise, quantise
from fewbytes.wire.schema import leaves_of


@st.composite
def states(draw: st.DrawFn) -> State:
    """Float32 tensors: noise of any size, constant ones, two values only, in any memory order."""
    state = {}
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    for name, shape in draw(st.dictionaries(NAMES, SHAPES, max_size=4)).items():
        value = (torch.from_numpy(np.asarray(rng.standard_normal(shape))) * 10.0 ** draw(st.integers(-40, 30))).float()
        value = draw(st.sampled_from([value, value.sign(), torch.full(shape, 0.3), value + 1]))
        state[name] = value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value
    return state


@slow
@given(states(), st.sampled_from([8, 16]), st.booleans(), st.booleans())
def test_quantised_values_come_back_within_half_a_step(state: State, bits: int, known: bool, coded: bool) -> None:
    layout = Layout.of(state | {"another": torch.zeros(1)}) if known else None
    sent = Quantised.of(state, bits)
    back = round_trip(Rounded(sent), layout=layout, coded=coded).model
    assert list(back.levels) == in_order(state, layout)
    assert same_state(back.dense(), sent.dense())
    for name, value in back.dense().items():
        wide = state[name].double()
        if wide.numel():
            step = float(wide.max() - wide.min()) / (2**bits - 1)
            assert (value - wide).abs().max() <= 0.51 * step + 3e-7 * float(wide.abs().max()) + 1e-44
            assert state[name].flatten()[state[name].argmin()] == value.flatten()[state[name].argmin()]
    assert counted(back) == Counted(sum(v.numel() for v in state.values()) * bits // 8)


@slow
@given(st.dictionaries(NAMES, SHAPES, max_size=4), st.sampled_from(DENSITIES), st.booleans(), st.booleans())
def test_bits_come_back(shapes: dict[str, tuple[int, ...]], density: float, known: bool, coded: bool) -> None:
    rng = np.random.default_rng(len(shapes))
    mask = {name: torch.from_numpy(rng.random((*shape, 1)) < density)[..., 0] for name, shape in shapes.items()}
    layout = Layout.of({name: torch.zeros(m.shape) for name, m in mask.items()}) if known else None
    back = round_trip(Choice(Bits(mask)), layout=layout, coded=coded).bits
    assert all(torch.equal(back.dense()[name], m.float()) for name, m in mask.items())
    assert counted(back) == Counted(mask_bits=sum(m.numel() for m in mask.values()))


@pytest.mark.golden
@pytest.mark.parametrize("bits", [8, 16])
def test_levels(golden, bits: int) -> None:
    g = golden("fedkgf/baselines")
    x, expected = torch.from_numpy(g["com_x"]), torch.from_numpy(g[f"com{bits}_deq"])
    levels, grid = quantise(x, bits)
    assert levels.tolist() == g[f"com{bits}_q"].tolist()
    told = torch.tensor([float(g[f"com{bits}_lo"]), float(g[f"com{bits}_scale"])], dtype=torch.float64)
    torch.testing.assert_close(grid, told, rtol=1e-9, atol=0)
    torch.testing.assert_close(dequantise(levels, grid), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(Quantised.of({"x": x}, bits).dense()["x"], expected.float(), rtol=2e-4, atol=1e-6)


def test_values_on_the_grid_stay_as_they_are() -> None:
    """Zero is not always on it; ties go to the even level."""
    on = torch.arange(256.0).view(2, 128) - 7
    assert torch.equal(Quantised.of({"a": on}, 8).dense()["a"], on)
    between = torch.tensor([0.0, 0.5, 1.5, 2.5, 255.0])
    assert Quantised.of({"a": between}, 8).levels["a"].tolist() == [0, 0, 2, 2, 255]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_visible(wrong: float) -> None:
    value = Quantised.of({"a": torch.tensor([1.0, wrong, 2.0]), "b": torch.ones(2)}, 16)
    assert value.dense()["a"].isnan().all()
    assert torch.equal(value.dense()["b"], torch.ones(2))
    with pytest.raises(Exception, match=r"'a' .*finite"):
        check_finite(leaves_of(Rounded(value)))


def test_a_reply_may_be_coded_against_quantised_values() -> None:
    message = Rounded(Quantised.of({"a": torch.linspace(0, 1, 50)}, 8))
    assert same_state(dict(base_of(bytes(32), message).tensors), message.model.dense())


@pytest.mark.parametrize(
    ("density", "factor"),
    [
        (0.5, 1.01), (0.4, 1.01), (0.3, 1.01), (0.7, 1.01), (0.1, 1.015), (0.2, 1.03), (0.8, 1.03), (0.13, 1.03),
        (0.12, 1.03), (0.05, 1.03), (0.95, 1.03), (0.01, 1.03), (0.003, 1.03), (0.997, 1.03),
    ],
)  # fmt: skip
def test_bits_take_their_entropy(density: float, factor: float) -> None:
    """As masks do, which are written alike."""
    bits = torch.from_numpy(np.random.default_rng(0).random(1_000_000) < density)
    p = float(bits.double().mean())
    bound = -bits.numel() * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 8
    size = len(pack(Choice(Bits({"m": bits})), layout=Layout.of({"m": bits.float()})))
    assert bound <= size <= factor * bound + 200


def test_bits_of_layers_that_differ_take_each_its_own_entropy() -> None:
    """Which a single code for all of them could not."""
    rng = np.random.default_rng(0)
    mask = {str(p): torch.from_numpy(rng.random(500_000) < p) for p in (0.02, 0.3, 0.5)}
    bound = sum(-n * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 8 for n, p in [(5e5, float(k)) for k in mask])
    assert len(pack(Choice(Bits(mask)))) <= 1.08 * bound


@pytest.mark.parametrize(("bits", "part"), [(8, 0.86), (16, 0.94)])
def test_quantised_noise_takes_less_than_its_bits(bits: int, part: float) -> None:
    noise = {"w": torch.from_numpy(np.random.default_rng(0).normal(0, 0.05, 1_000_000)).float()}
    assert len(pack(Rounded(Quantised.of(noise, bits)))) <= part * 1e6 * bits / 8


@pytest.mark.parametrize(
    "field",
    [
        None, [], [True], [True, 8, [0]], [True, 8, [0], [0], [0]], [True, 7, [0], [0]], [True, True, [0], [0]],
        [True, 32, [0], [0]], [True, 8.0, [0], [0]], [True, 16, [0], [0]], [True, 8, None, [0]], [True, 8, [0], None],
        [[["w", "float64", [3]]], 8, [0], [0]], [[["w", "float32", [4]]], 8, [0], [0]], [[], 8, [0], [0]],
        [[["w", "float32", [1 << 50]]], 8, [0], [0]],
    ],
)  # fmt: skip
def test_headers_that_do_not_fit_are_refused(field: object) -> None:
    """The right one is [True, 8, [0], [0]], of two sections: eight bytes of the grid, three of levels."""
    layout = Layout.of({"w": torch.zeros(3)})
    sections = [np.array([0.5, 2.0], np.float32).tobytes(), bytes([0, 1, 255])]
    case = Case(Rounded, b"", layout)
    good = assemble("Rounded", [[True, 8, [0], [0]]], sections, layout=layout.hash)
    assert unpack(Rounded, good, layout=layout).model.dense()["w"].tolist() == [0.5, 2.5, 510.5]
    case.refuse(assemble("Rounded", [field], sections, layout=layout.hash))


@pytest.mark.parametrize("entry", [["w", "bool", [8]], ["w", "float64", [8]], ["w", "float32", [9]]])
def test_bits_of_other_entries_are_refused(entry: list[object]) -> None:
    header = [0, 0, 1, 3]
    good = assemble("Choice", [[[["w", "float32", [8]]], header]], [b"\x31"])
    assert unpack(Choice, good).bits.bits["w"].tolist() == [1, 0, 0, 0, 1, 1, 0, 0]
    Case(Choice, b"").refuse(assemble("Choice", [[[entry], header]], [b"\x31"]))


@pytest.mark.parametrize(("name", "size"), [("bits without layout", 4000), ("quantised without layout", 2 * 560 + 16)])
def test_a_receiver_holds_no_more_than_its_limit(name: str, size: int) -> None:
    """Bits, levels and two numbers for each of two tensors; and what they are as float32."""
    case = cases()[name]
    size += 4 * {"bits without layout": 4000, "quantised without layout": 560}[name]
    case.unpack(limit=size)
    assert case.refuse(case.frame, limit=size - 1) == "length"
