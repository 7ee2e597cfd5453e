"""Differences on a grid add up exactly; statistics are rounded finely, and variances stay above 0."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fewbytes.base.rate import Rate
from fewbytes.codec.delta import Coding, DeltaStream, advanced, followed, merged, started
from fewbytes.codec.first import First
from fewbytes.methods.parts.averaging import Model
from fewbytes.wire import Base, Dense, FrameError, Layout, Lossy, pack, pack_state, unpack, unpack_state
from fewbytes.wire.grid import snapped, unit_of

BITS = st.lists(st.floats(0.3, 8), min_size=2, max_size=6)


def weights(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    numbers = torch.manual_seed(seed)
    draw = {"w": (60, 40), "b": (60,), "wide": (5,)}
    state = {name: scale * torch.randn(shape, generator=numbers) for name, shape in draw.items()}
    return state | {"wide": 100 * state["wide"], "double": state["b"].double(), "count": torch.tensor(seed)}


def moved(state: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    steps = weights(seed, 0.01)
    return {name: value + (steps[name] if value.is_floating_point() else 1) for name, value in state.items()}


@settings(max_examples=25, deadline=None)
@given(BITS, st.integers(0, 99))
def test_missed_messages_are_one_frame_that_leads_to_the_same_bits(bits: list[float], seed: int) -> None:
    first = First(weights(seed))
    layout = Layout.of(dict(first.exact.tensors))
    at = Coding(layout, rate=Rate(1.0), first=first)
    stream, now, frame = started("s", 1, Model(Dense(weights(seed))), at)
    held = {1: now.kept}
    for number, each in enumerate(bits, 2):
        coding = Coding(layout, rate=Rate(each), first=first)
        message = Model(Dense(moved(now.message.theta.dense(), seed + number)))
        stream, now, frame, lossy = advanced(stream, message, coding, shared=True)
        assert lossy is not None
        assert followed(Model, bytes(frame), layout, held[number - 1]).kept == now.kept
        held[number] = now.kept
    kept = [number for number in range(1, stream.number) if stream.since(number)]  # older steps may be gone
    found = merged(stream, Model, at, [None, *range(1, stream.number)])
    assert found.keys() == {None, *kept}
    for since in kept:
        assert followed(Model, found[since], layout, held[since]).kept == now.kept
        assert merged(stream, Model, at, [since]) == {since: found[since]}
    newcomer = found[None]
    origin = unpack(Model, stream.first, layout=layout, base=first.on_grid)
    assert len(stream.first) < len(held[1]) / 10
    assert followed(Model, newcomer, layout, held[1]).kept == now.kept
    assert bytes(pack(origin, layout=layout, coded=False)) == held[1]


def test_one_frame_for_ten_messages_is_smaller_than_they_are() -> None:
    first = First(weights(0))
    coding = Coding(Layout.of(dict(first.exact.tensors)), rate=Rate(0.5), first=first)
    stream, now, _ = started("s", 1, Model(Dense(weights(0))), coding)
    for number in range(10):
        stream, now, *_ = advanced(stream, Model(Dense(moved(now.message.theta.dense(), number))), coding, shared=True)
    one = merged(stream, Model, coding, [1])[1]
    assert 2 * len(one) < sum(map(len, stream.steps))


def test_a_stream_of_a_version_without_grids_starts_again_in_full() -> None:
    """Its checkpoint has the first five fields; in a frame from elsewhere, no field may be missing."""
    older = dataclasses.make_dataclass(
        "DeltaStream",
        [
            ("name", str),
            ("number", int),
            ("held", bytes),
            ("lost", dict[str, dict[str, Tensor]]),
            ("steps", list[bytes]),
        ],
    )
    layout, model = Layout.of(weights(0)), Model(Dense(weights(0)))
    data = bytes(pack_state(older("s", 7, bytes(pack(model, layout=layout, coded=False)), {}, [b"step"])))
    stream = unpack_state(DeltaStream, data)
    assert (stream.name, stream.number, stream.steps, stream.unit) == ("s", 7, [b"step"], 0)
    with pytest.raises(FrameError, match="number of fields"):
        unpack(DeltaStream, data)
    coding = Coding(layout, rate=Rate(1.0))
    after, now, frame, lossy = advanced(stream, Model(Dense(moved(weights(0), 1))), coding, shared=True)
    assert (after.number, after.steps, lossy) == (8, [], None)
    assert after.unit > 0
    assert bytes(pack(unpack(Model, bytes(frame), layout=layout), layout=layout, coded=False)) == now.kept


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 999), st.floats(1e-6, 1e6))
def test_values_move_to_a_grid_by_little_and_once(seed: int, scale: float) -> None:
    state = weights(seed, scale)
    unit = unit_of(state.values())
    once = snapped(state, unit)
    peak = max(float(value.abs().max()) for value in state.values() if value.is_floating_point())
    assert all(float((once[name] - value).abs().max()) <= 2.0**-19 * peak for name, value in state.items())
    assert all(torch.equal(value, once[name]) for name, value in snapped(once, unit).items())


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 999), st.sampled_from([1.0, 1e-2, 1e-6]), st.booleans())
def test_variances_stay_above_0_and_are_close(seed: int, least: float, shrinks: bool) -> None:
    numbers = torch.manual_seed(seed)
    before = {"bn.running_var": least + torch.rand(64, generator=numbers), "w": torch.randn(300, generator=numbers)}
    factor = 10.0 ** -torch.randint(0, 8, (64,), generator=numbers) if shrinks else torch.full((64,), 1.5)
    after = {"bn.running_var": before["bn.running_var"] * factor, "w": before["w"] + 0.01}
    statistics, layout, base = {"bn.running_var"}, Layout.of(before), Base(b"b" * 32, before)
    lossy = Lossy(Rate(0.5), statistics, fine=statistics)
    frame = bytes(pack(Model(Dense(after)), layout=layout, base=base, lossy=lossy))
    there = unpack(Model, frame, layout=layout, base=base).theta.dense()["bn.running_var"]
    exact = after["bn.running_var"]
    assert bool((there > 0).all())
    assert float((there - exact).norm()) < 0.2 * float((exact - before["bn.running_var"]).norm())
    left = lossy.residual["Model.theta"]["bn.running_var"]
    assert torch.allclose(there + left, exact, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_statistics_that_are_not_finite_travel_as_they_are(value: float) -> None:
    before, statistics = {"bn.running_var": torch.ones(8)}, {"bn.running_var"}
    after = {"bn.running_var": torch.full((8,), value)}
    layout, base = Layout.of(before), Base(b"b" * 32, before)
    frame = bytes(
        pack(Model(Dense(after)), layout=layout, base=base, lossy=Lossy(Rate(1.0), statistics, fine=statistics))
    )
    there = unpack(Model, frame, layout=layout, base=base).theta.dense()
    torch.testing.assert_close(there, after, rtol=0, atol=0, equal_nan=True)
