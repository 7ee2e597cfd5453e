"""What is rounded comes back nearly, and what is missing is kept for later, for any tensors; what is left alone comes
back bit for bit."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from payloads import Choice, Few, Rounded
from test_wire import Part, Tables, Whole, same, same_tensor, slow
from torch import Tensor

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import EXACT, FRESH
from fewbytes.base.rate import Rate
from fewbytes.base.state import State
from fewbytes.wire import Base, Bits, Dense, FrameError, Layout, Lossy, Masked, Quantised, TopK, pack, payload, unpack
from fewbytes.wire.topk import largest

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
EXACT_TYPES = [torch.int64, torch.int8, torch.bool]
RATES = st.one_of(
    st.floats(0.3, 8).map(Rate), st.floats(-12, 5).map(lambda power: Rate(step=2**power)), st.just(Rate(step=1e-3))
)
SHAPES = st.one_of(
    st.sampled_from([(), (0,), (1,), (3, 0, 2), (700,), (40, 30), (1, 90), (70, 1), (8, 4, 3, 3), (64, 3, 1, 1)]),
    st.sampled_from([(2, 3, 2, 3, 2), (40, 2, 2, 2, 2), (2000,), (65, 33)]),
    st.lists(st.integers(0, 5), max_size=5).map(tuple),
)


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[torch.dtype], shape: tuple[int, ...] | None = None) -> Tensor:
    """Finite numbers of many distributions, in any memory order."""
    dtype, shape = draw(st.sampled_from(dtypes)), draw(SHAPES) if shape is None else shape
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    size = math.prod(shape)
    match draw(st.sampled_from(["usual", "channels", "sparse", "zeros", "constant", "outlier", "denormal"])):
        case "usual":
            numbers = rng.normal(0, 10.0 ** draw(st.integers(-6, 3)), size)
        case "channels":
            scales = rng.lognormal(0, 3, (shape[0] if shape else 1, 1)) if size else np.ones((1, 1))
            numbers = (rng.normal(0, 1, (len(scales), size // len(scales))) * scales).clip(-1e4, 1e4).reshape(-1)
        case "sparse":
            numbers = rng.normal(0, 1, size) * (rng.random(size) < 0.02)
        case "zeros":
            numbers = np.zeros(size)
        case "constant":
            numbers = np.full(size, 0.3)
        case "outlier":
            numbers = rng.normal(0, 1, size)
            numbers[:1] = 3e4
        case _:
            numbers = rng.normal(0, float(torch.finfo(dtype).tiny if dtype.is_floating_point else 1), size)
    value = torch.from_numpy(np.asarray(numbers, np.float64)).to(dtype).reshape(shape)
    if value.ndim > 1 and draw(st.booleans()):
        return value.transpose(0, -1).contiguous().transpose(0, -1)
    return value


@st.composite
def packets(draw: st.DrawFn) -> tuple[State, Base | None]:
    """A state to send and perhaps the message it answers, which holds more or less of the same entries."""
    state = draw(st.dictionaries(st.sampled_from("abcdef"), tensors(FLOATS + EXACT_TYPES), max_size=5))
    how = draw(st.sampled_from(["no base", "near", "far", "another"]))
    if how == "no base":
        return state, None
    held: State = {}
    for name, value in state.items():
        if draw(st.booleans()):
            held[name] = value.clone() if how == "near" else draw(tensors([value.dtype], tuple(value.shape)))
            if how == "another":
                held[name] = held[name].to(torch.float32)
    return state, Base(blake3(b"message").digest(), held)


def tolerance(dtype: torch.dtype, *numbers: Tensor) -> Tensor:
    """What rounding to float32, or to a narrower type, may change in sums of these numbers."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    tiny = max(torch.finfo(dtype).tiny, torch.finfo(torch.float32).tiny) * 2
    return 4 * eps * torch.stack([number.double().abs() for number in numbers]).sum(0) + tiny


def check_tensor(sent: Tensor, received: Tensor, before: Tensor | None, after: Tensor, base: Tensor | None) -> None:
    """What came and what is missing is what was to be sent with what was missing before."""
    zero = torch.zeros(sent.shape, dtype=torch.float64)
    before, known = zero if before is None else before.double(), zero if base is None else base.double()
    assert received.dtype == sent.dtype
    assert received.shape == sent.shape == after.shape
    error = (received.double() + after.double() - sent.double() - before).abs()
    assert (error <= tolerance(sent.dtype, sent, before, known, received, after)).all()


def residual_of(lossy: Lossy) -> State:
    """The residual of the only field."""
    return {name: lost.clone() for lost_of in lossy.residual.values() for name, lost in lost_of.items()}


@settings(slow, max_examples=150)
@given(packets(), RATES, st.booleans(), st.integers(1, 3))
def test_what_came_and_what_is_missing_is_what_was_sent(
    packet: tuple[State, Base | None], rate: Rate, layout: bool, rounds: int
) -> None:
    state, base = packet
    known, residual, held = Layout.of(state) if layout else None, {}, {} if base is None else base.tensors
    for _ in range(rounds):
        before = {name: lost for lost_of in residual.values() for name, lost in lost_of.items()}
        lossy = Lossy(rate, residual=residual)
        frame = bytes(pack(Whole(Dense(state)), layout=known, base=base, lossy=lossy))
        received = unpack(Whole, frame, layout=known, base=base).model.state
        after = residual_of(lossy)
        assert received.keys() == state.keys()
        for name, sent in state.items():
            if name not in after:
                assert same_tensor(received[name], sent)
            else:
                answered = held.get(name)
                same_kind = answered is not None and (answered.dtype, answered.shape) == (sent.dtype, sent.shape)
                check_tensor(sent, received[name], before.get(name), after[name], answered if same_kind else None)
        assert {name for name, sent in state.items() if sent.is_floating_point() and sent.numel()} <= after.keys()
        assert all(state[name].is_floating_point() for name in after)
        assert 0 <= lossy.nmse <= 1.5
        residual = lossy.residual


@settings(slow, max_examples=100)
@given(st.data(), st.sampled_from(FLOATS), RATES, st.sampled_from(["all", "none", "some", "few"]), st.booleans())
def test_of_a_mask_only_what_is_kept_is_sent_and_the_rest_goes_on_missing(
    data: st.DataObject, dtype: torch.dtype, rate: Rate, kept: str, answers: bool
) -> None:
    state = data.draw(st.dictionaries(st.sampled_from("abc"), tensors([dtype]), min_size=1, max_size=3))
    density = {"all": 1.0, "none": 0.0, "some": 0.4, "few": 0.02}[kept]
    held = {name: data.draw(tensors([dtype], tuple(value.shape))) for name, value in state.items()} if answers else {}
    base = Base(blake3(b"message").digest(), held) if answers else None
    rng, residual = np.random.default_rng(data.draw(st.integers(0, 1 << 32))), {}
    for _ in range(2):  # another mask in each round
        mask = {name: torch.from_numpy(np.asarray(rng.random(value.shape) < density)) for name, value in state.items()}
        before = {name: lost for lost_of in residual.values() for name, lost in lost_of.items()}
        lossy = Lossy(rate, residual=residual)
        frame = bytes(pack(Part(Masked.of(state, mask)), base=base, lossy=lossy))
        received, after = unpack(Part, frame, base=base).model, residual_of(lossy)
        assert all(torch.equal(received.mask[name], mask[name]) for name in state)
        for name, value in received.states().items():
            if name in after:
                here, was = mask[name], before.get(name, torch.zeros(value.shape))
                check_tensor(
                    state[name][here], value[here], was[here], after[name][here],
                    held[name][here] if answers else None,
                )  # fmt: skip
                assert torch.equal(after[name][~here], was[~here])
            else:
                assert not mask[name].any()
        residual = lossy.residual


def numbers(size: int = 100_000, kind: str = "normal", seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=size) if kind == "normal" else rng.laplace(size=size)).float()


def sent(state: Mapping[str, Tensor], lossy: Lossy | None = None, base: Base | None = None) -> tuple[State, int]:
    """What is received of a state, and the bytes of its frame."""
    frame = bytes(pack(Whole(Dense(dict(state))), lossy=lossy, base=base))
    return unpack(Whole, frame, base=base).model.state, len(frame)


@pytest.mark.parametrize("kind", ["normal", "laplace"])
@pytest.mark.parametrize("bits", [0.3, 0.8, 2, 8])
def test_the_bits_are_near_those_asked_for(kind: str, bits: float) -> None:
    state = {"w": numbers(90_000, kind).view(100, 100, 3, 3), "v": 0.1 * numbers(10_000, kind, 1)}
    lossy = Lossy(Rate(bits))
    _, nbytes = sent(state, lossy)
    assert lossy.values == 100_000
    assert lossy.bits_a_value(nbytes) == 8 * nbytes / 100_000 == pytest.approx(bits, rel=0.2)


def test_the_bits_count_what_is_left_alone_too() -> None:
    state = {"w": numbers(10_000), "norm.running_var": numbers(10_000, seed=1)}
    lossy = Lossy(Rate(0.5), exact={"norm.running_var"})
    _, nbytes = sent(state, lossy)
    assert (lossy.values, lossy.left) == (10_000, 10_000)
    assert lossy.bits_a_value(nbytes) == 8 * nbytes / 20_000 > 12


def test_a_bare_value_is_not_rounded_in_silence() -> None:
    """It would travel whole."""
    with pytest.raises(UserError, match="bare Dense"):
        pack(Dense({"w": numbers()}), lossy=Lossy(Rate(1)))


def test_more_bits_lose_less() -> None:
    errors = []
    for bits in (0.3, 0.8, 2, 4, 8):
        lossy = Lossy(Rate(bits))
        sent({"w": numbers()}, lossy)
        errors.append(lossy.nmse)
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.12  # the least that two bits of normal numbers can: 1/16
    assert errors[-1] < 1e-4


def test_what_was_lost_is_what_it_says() -> None:
    state, residual = {"w": numbers(), "v": 5 * numbers(1000, seed=1)}, {}
    for _ in range(3):
        wanted = {name: value + residual.get(name, 0) for name, value in state.items()}
        lossy = Lossy(Rate(0.8), residual={"Whole.model": residual} if residual else {})
        received, _ = sent(state, lossy)
        lost = sum(float((wanted[name] - received[name]).double().square().sum()) for name in state)
        assert lossy.nmse == pytest.approx(lost / sum(float(v.double().square().sum()) for v in wanted.values()), 1e-4)
        residual = residual_of(lossy)


def test_a_step_is_kept_to() -> None:
    value = numbers()
    for step in (0.01, 0.5, 3):
        lossy = Lossy(Rate(step=step))
        sent({"w": value}, lossy)
        rms = float(value.square().mean().sqrt())
        assert float(lossy.residual["Whole.model"]["w"].abs().max()) < 1.1 * step * rms


@pytest.mark.parametrize("kind", ["normal", "laplace"])
def test_it_loses_less_than_the_largest_values_in_as_many_bytes(kind: str) -> None:
    """Of an update as they are, whose channels differ."""
    value = numbers(90_000, kind).view(100, 100, 3, 3) * numbers(100, seed=2).exp().view(100, 1, 1, 1)
    energy = float(value.square().sum())
    for bits in (0.3, 0.8, 2):
        lossy = Lossy(Rate(bits))
        _, nbytes = sent({"w": value}, lossy)
        count = 90_000 // 32
        while True:  # as many of the largest as take more bytes
            few = TopK.of({"w": value}, {"w": largest(value.reshape(-1).abs(), count)})
            if len(pack(Few(few))) > nbytes:
                break
            count = count * 5 // 4
        error = float((few.states()["w"] - value).square().sum()) / energy
        assert lossy.nmse < 0.9 * error


def test_over_rounds_all_arrives() -> None:
    """The sum of what comes nears the sum of what was sent: it lacks only what is missing in the end."""
    rng, lossy = np.random.default_rng(0), Lossy(Rate(0.5))
    wanted, came, missing = torch.zeros(50, 80), torch.zeros(50, 80), []
    for _ in range(30):
        update = torch.from_numpy(rng.normal(0.3, 1, (50, 80))).float()
        lossy = Lossy(Rate(0.5), residual=lossy.residual)
        received, _ = sent({"w": update}, lossy)
        wanted, came = wanted + update, came + received["w"]
        missing.append(float((wanted - came).norm() / wanted.norm()))
        torch.testing.assert_close(came + lossy.residual["Whole.model"]["w"], wanted, rtol=1e-4, atol=1e-4)
    assert missing[-1] < 0.35 * missing[0]


def test_a_base_is_used_where_it_is_near() -> None:
    """Then the same error takes far fewer bits; and a receiver without it says so."""
    value, digest = numbers(), blake3(b"message").digest()
    near, far = Base(digest, {"w": value + 1e-3 * numbers(seed=1)}), Base(digest, {"w": 9 * numbers(seed=2)})
    lossy = Lossy(Rate(2))
    received, _ = sent({"w": value}, lossy, near)
    assert float((received["w"] - value).norm() / value.norm()) < 1e-3
    with_far, without = Lossy(Rate(2)), Lossy(Rate(2))
    assert torch.equal(sent({"w": value}, with_far, far)[0]["w"], sent({"w": value}, without)[0]["w"])
    frame = bytes(pack(Whole(Dense({"w": value})), base=near, lossy=Lossy(Rate(2))))
    with pytest.raises(FrameError, match="does not hold"):
        unpack(Whole, frame)
    with pytest.raises(FrameError, match="does not hold"):
        unpack(Whole, frame, base=Base(digest, {}))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_sent_as_they_are(wrong: float, dtype: torch.dtype) -> None:
    """With all of their type; the server is to see them."""
    value = numbers(1000).to(dtype)
    value[3] = wrong
    state, missing = {"w": value, "v": numbers(500).to(dtype)}, {"v": torch.ones(500)}
    lossy = Lossy(Rate(1), residual={"Whole.model": dict(missing)})
    received, nbytes = sent(state, lossy)
    assert all(same_tensor(received[name], state[name]) for name in state)
    assert (lossy.values, lossy.left, lossy.nmse, lossy.bits_a_value(nbytes)) == (0, 0, 0, 0)
    assert torch.equal(lossy.residual["Whole.model"]["v"], missing["v"])


@pytest.mark.parametrize(
    "value",
    [torch.zeros(500), torch.full((500,), 1e-42), torch.tensor(0.7), torch.tensor([-3e-5]), torch.full((64, 9), -1.5)],
    ids=["zeros", "denormal", "scalar", "one", "constant"],
)
def test_tensors_that_are_hardly_any(value: Tensor) -> None:
    for rate in (Rate(0.3), Rate(8), Rate(step=0.5)):
        lossy = Lossy(rate)
        received, _ = sent({"w": value}, lossy)
        check_tensor(value, received["w"], None, lossy.residual["Whole.model"]["w"], None)


@pytest.mark.parametrize("outlier", [1e4, 1e9, 1e17, 3e38])
def test_an_outlier_is_sent_sooner_or_later(outlier: float) -> None:
    value, lossy, came = numbers(20_000), Lossy(Rate(8)), torch.zeros(20_000)
    value[7] = outlier
    for t in range(40):
        lossy = Lossy(Rate(8), residual=lossy.residual)
        came += sent({"w": value if t == 0 else torch.zeros(20_000)}, lossy)[0]["w"]
    assert float(came[7]) == pytest.approx(outlier, rel=0.01)


def test_what_is_spared_is_sent_as_it_is_and_takes_no_part() -> None:
    state = {"w": numbers(), "stats": 1e6 * numbers(10, seed=1), "steps": torch.tensor(7), "flag": torch.tensor(True)}
    lossy, alone = Lossy(Rate(1), exact={"stats"}), Lossy(Rate(1))
    received, _ = sent(state, lossy)
    assert all(same_tensor(received[name], state[name]) for name in ("stats", "steps", "flag"))
    assert same_tensor(received["w"], sent({"w": state["w"]}, alone)[0]["w"])
    assert lossy.residual["Whole.model"].keys() == {"w"}
    assert (lossy.values, lossy.nmse) == (100_000, alone.nmse)


@payload
class Marked:
    """Fields that a run rounds, leaves alone, and rounds without sending later what that loses; marks hold for all
    that is in a field, and for a field of it."""

    model: Dense
    exact: Annotated[list[Whole], EXACT]
    anew: Annotated[dict[str, Dense], FRESH]
    inner: Inner | None


@payload
class Inner:
    model: Dense
    exact: Annotated[Dense, EXACT]
    anew: Annotated[Masked, FRESH]


def marked() -> Marked:
    def dense(seed: int) -> Dense:
        return Dense({"w": numbers(2000, seed=seed)})

    kept = Masked.of({"w": numbers(2000, seed=9)}, {"w": numbers(2000, seed=8) > 0})
    return Marked(dense(1), [Whole(dense(2))], {"a": dense(3)}, Inner(dense(4), dense(5), kept))


def test_marks_say_which_fields_are_rounded_and_which_go_on() -> None:
    value, lossy = marked(), Lossy(Rate(1))
    received = unpack(Marked, bytes(pack(value, lossy=lossy)))
    assert received.inner is not None
    assert value.inner is not None
    exact = [(value.exact[0].model, received.exact[0].model), (value.inner.exact, received.inner.exact)]
    assert all(same_tensor(mine.state["w"], theirs.state["w"]) for mine, theirs in exact)
    assert not any(
        torch.equal(mine.dense()["w"], theirs.dense()["w"])
        for mine, theirs in (
            (value.model, received.model),
            (value.anew["a"], received.anew["a"]),
            (value.inner.model, received.inner.model),
            (value.inner.anew, received.inner.anew),
        )
    )
    assert (lossy.values, lossy.left) == (6000 + len(value.inner.anew.values), 4000)
    assert lossy.residual.keys() == {"Marked.model", "Marked.inner.model"}


def test_what_is_made_anew_each_time_loses_for_good() -> None:
    first, second = (unpack(Marked, bytes(pack(marked(), lossy=lossy))) for lossy in (Lossy(Rate(1)),) * 2)
    assert same_tensor(first.anew["a"].state["w"], second.anew["a"].state["w"])
    assert not torch.equal(first.model.state["w"], second.model.state["w"])


def test_what_is_no_tensor_of_the_models_loses_for_good() -> None:
    """Of values that are made anew each time, such as prototypes, the last are what counts."""
    layout, lossy = Layout.of({"w": numbers()}), Lossy(Rate(1))
    for _ in range(2):
        pack(Whole(Dense({"w": numbers(), "prototype": numbers()})), layout=layout, lossy=lossy)
    assert lossy.nmse > 0
    assert lossy.residual["Whole.model"].keys() == {"w"}


def test_when_all_is_spared_the_frame_is_as_without() -> None:
    value = Whole(Dense({"w": numbers(1000), "steps": torch.tensor(3)}))
    assert bytes(pack(value, lossy=Lossy(Rate(1), exact={"w"}))) == bytes(pack(value))


OTHERS = [
    Choice(Bits({"w": numbers(100) > 0})),
    Rounded(Quantised.of({"w": numbers(100)}, 8)),
    Few(TopK.of({"w": numbers(100)}, {"w": torch.arange(9)})),
    Tables({1: numbers(50)}, [1]),
    Part(Masked.of({"m": torch.arange(100)}, {"m": torch.arange(100) % 3 == 0})),
]


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
def test_other_values_are_sent_as_they_are(value: Any) -> None:
    lossy = Lossy(Rate(0.3))
    assert bytes(pack(value, lossy=lossy)) == bytes(pack(value))
    assert not lossy.residual


def test_a_tensor_of_another_shape_has_lost_nothing() -> None:
    lossy = Lossy(Rate(0.5))
    sent({"w": numbers(60)}, lossy)
    for shape in ((40,), (6, 10), (3, 2, 9)):
        fresh, lossy = Lossy(Rate(0.5)), Lossy(Rate(0.5), residual=lossy.residual)
        value = numbers(math.prod(shape)).view(shape)
        assert torch.equal(sent({"w": value}, lossy)[0]["w"], sent({"w": value}, fresh)[0]["w"])
        assert torch.equal(lossy.residual["Whole.model"]["w"], fresh.residual["Whole.model"]["w"])


def test_the_bytes_depend_on_the_numbers_alone() -> None:
    """Not on where in memory they lie, nor how, nor on what was packed before."""
    value, frames = numbers(30_001).clamp(-2, 2)[1:].view(100, 300), set()
    room = torch.zeros(30_100)
    for shift in range(0, 40, 3):
        there = room[shift : shift + 30_000].view(100, 300)
        there[:] = value
        base = Base(blake3(b"message").digest(), {"w": torch.zeros(100, 300)})
        frames.add(bytes(pack(Whole(Dense({"w": there})), base=base, lossy=Lossy(Rate(1.3)))))
    base = Base(blake3(b"message").digest(), {"w": torch.zeros(300, 100).t()})
    frames.add(bytes(pack(Whole(Dense({"w": value.t().contiguous().t()})), base=base, lossy=Lossy(Rate(1.3)))))
    assert len(frames) == 1


def test_what_comes_is_the_same_twice_and_can_travel_again() -> None:
    state = {"w": numbers(3000).view(30, 100), "b": numbers(30, seed=1), "n": torch.tensor(4)}
    frame = bytes(pack(Whole(Dense(state)), layout=Layout.of(state), lossy=Lossy(Rate(1))))
    first, second = (unpack(Whole, frame, layout=Layout.of(state)) for _ in range(2))
    assert same(first, second)
    assert same(first, unpack(Whole, bytes(pack(first))))
    moved = bytearray(b"\xaa" + frame)  # at an odd address
    third = unpack(Whole, memoryview(moved)[1:], layout=Layout.of(state))
    moved[:] = bytes(len(moved))
    assert same(first, third)  # its tensors own their memory


def test_what_is_rounded_counts_against_the_limit_once() -> None:
    state = {"w": numbers(1000), "stats": numbers(100, seed=1)}
    frame = bytes(pack(Whole(Dense(state)), lossy=Lossy(Rate(1), exact={"stats"})))
    assert set(unpack(Whole, frame, limit=4400).model.state) == set(state)
    for limit in (0, 400, 4000, 4399):
        with pytest.raises(FrameError, match="larger than this receiver"):
            unpack(Whole, frame, limit=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [0.5, 8])
def test_decoding_takes_little_more_than_the_limit(bits: float, dtype: torch.dtype) -> None:
    """Rounded numbers of narrow types count as float32, which they are on the way."""
    value = numbers(1 << 21).view(256, 128, 8, 8).to(dtype)
    base = Base(blake3(b"message").digest(), {"w": value / 2})
    frame, limit = bytes(pack(Whole(Dense({"w": value})), base=base, lossy=Lossy(Rate(bits)))), 4 * value.numel()
    tracemalloc.start()
    unpack(Whole, frame, base=base, limit=limit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3.1 * limit
    with pytest.raises(FrameError, match="larger than this receiver"):
        unpack(Whole, frame, base=base, limit=limit - 1)
