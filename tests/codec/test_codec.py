"""The codec on states as people have them: exact or rounded, whole or as a difference, and whatever bytes come."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewbytes.base.errors import LikelyMistake, UserError
from fewbytes.codec import DecodeError, Encoder, decode, encode
from fewbytes.wire.values import flat_words

FRAMES = Path(__file__).parent / "frames"
TYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def drawn(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text(max_size=8), max_size=5, unique=True))
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    return {name: drawn(draw(st.sampled_from(TYPES)), draw(shapes), i) for i, name in enumerate(names)}


def bits_of(value: torch.Tensor) -> list[int]:
    return flat_words(value).tolist()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(
        value.dtype == other[name].dtype and value.shape == other[name].shape and bits_of(value) == bits_of(other[name])
        for name, value in one.items()
    )


class Net(torch.nn.Module):
    """With batch norm, whose statistics are not rounded by default."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(40, 30)
        self.norm = torch.nn.BatchNorm1d(30)


@given(states(), states(), st.booleans())
def test_what_is_encoded_without_bits_comes_back_to_the_bit(state, base, has_base):
    against = base if has_base else None
    assert equal(decode(encode(state, against), against), state)


@pytest.mark.parametrize("bits", [None, 0.5, 2])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_travels_whole_or_as_a_difference(dtype, bits):
    base = {"w": drawn(dtype, (30, 20), 1), "one": drawn(dtype, (), 2), "none": drawn(dtype, (0, 3), 3)}
    state = {"w": drawn(dtype, (30, 20), 4), "one": base["one"], "none": base["none"]}
    for against in (None, base):
        received = decode(encode(state, against, bits), against)
        assert {name: (value.dtype, value.shape) for name, value in received.items()} == {
            name: (value.dtype, value.shape) for name, value in state.items()
        }
        if bits is None or not dtype.is_floating_point:
            assert equal(received, state)
        else:
            assert float((received["w"] - state["w"]).double().norm()) < float(state["w"].double().norm())


def test_views_tied_weights_and_gradients_travel():
    wide = torch.randn(10, 10, requires_grad=True)
    state = {"tied": wide, "also": wide, "part": wide.t()[::2], "expanded": torch.ones(1).expand(5)}
    assert equal(decode(encode(state)), {name: value.detach() for name, value in state.items()})


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3), np.ones((2, 3), order="F"), np.arange(5.0)[::-1], np.float32(3),
        np.array(7), np.array([True]), np.zeros((0, 2), np.float16), np.broadcast_to(np.ones(1), (4,)),
    ],
)  # fmt: skip
def test_arrays_come_back_as_arrays(array):
    named, numbered = decode(encode({"a": array})), decode(encode([array, array]))
    for back in (named["a"], *numbered):
        assert isinstance(back, np.ndarray)
        assert (back.shape, back.dtype.newbyteorder("=")) == (np.shape(array), array.dtype.newbyteorder("="))
        np.testing.assert_array_equal(back, array)
    assert [type(named), type(numbered)] == [dict, list]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"w": [1.0]}, "'w'.*not a tensor"), ({"w": torch.ones(2).to_sparse()}, "'w'"), ({1: torch.ones(1)}, "names"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, "'w'.*complex64"), ([np.array(["a"])], "'0'.*cannot travel"),
        ("weights", "dict of tensors"), (torch.ones(3), "dict of tensors"), ([[1.0]], "'0'.*NumPy"),
        ({"a": np.ones(2), "b": torch.ones(2)}, "'b'.*NumPy"), ([np.ones(2, np.uint16)], "'0'"),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_named(state, words):
    with pytest.raises(TypeError, match=words):
        encode(state)


@pytest.mark.parametrize("bits", [0, -1, 0.01, 17, float("nan"), "1", True])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(UserError, match="bits must be"):
        encode({"w": torch.ones(3)}, bits=bits)


def test_fewer_bits_are_fewer_bytes_and_a_base_saves_more():
    base = {"w": torch.randn(300, 300)}
    state = {"w": base["w"] + torch.randn(300, 300) / 100}
    sizes = [len(encode(state, base, bits)) for bits in (None, 4, 2, 1, 0.5)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(8 * size / 90_000 < 1.3 * bits for size, bits in zip(sizes[1:], (4, 2, 1, 0.5), strict=True))
    assert sizes[0] < len(encode(state))


def test_statistics_and_counters_are_not_rounded_by_name():
    net = Net()
    net.norm(torch.randn(20, 30))
    received = decode(encode(net.state_dict(), bits=1))
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, received[name])}
    assert changed == {"layer.weight", "layer.bias", "norm.weight", "norm.bias"} & changed
    assert "layer.weight" in changed


@pytest.mark.parametrize("exact", [["w"], lambda name: name == "w", {"w"}])
def test_tensors_may_be_named_that_are_not_rounded(exact):
    state = {"w": torch.randn(50, 50), "v": torch.randn(50, 50)}
    received = decode(Encoder(1, exact=exact).encode(state))
    assert torch.equal(received["w"], state["w"])
    assert not torch.equal(received["v"], state["v"])


def test_numbered_arrays_say_once_that_statistics_are_not_known():
    state = [np.random.default_rng(0).normal(size=(40, 40)) for _ in range(2)]
    with pytest.warns(LikelyMistake, match="exact="):
        encode(state, bits=1)
    received = decode(Encoder(1, exact={1}).encode(state))
    np.testing.assert_array_equal(received[1], state[1])
    assert not np.array_equal(received[0], state[0])
    decode(Encoder(1, exact=()).encode(state))
    with pytest.raises(UserError, match="'7'"):
        Encoder(1, exact=[7]).encode(state)


@settings(max_examples=20)
@given(st.sampled_from([0.3, 1, 3]), st.integers(0, 1000))
def test_what_rounding_loses_is_sent_later(bits, seed):
    """The sum of all that was received is the sum of all that was sent, but for what is still in the residual."""
    generator = torch.Generator().manual_seed(seed)
    encoder, sent, received = Encoder(bits), torch.zeros(400), torch.zeros(400)
    for _ in range(8):
        update = torch.randn(400, generator=generator)
        sent += update
        received += decode(encoder.encode({"w": update}))["w"]
    assert torch.allclose(received + encoder.residual["w"], sent, atol=1e-4)


def test_a_message_that_is_rolled_back_has_not_happened():
    state = {"w": torch.randn(500)}
    encoder = Encoder(0.5)
    encoder.encode(state)
    before = dict(encoder.residual)
    first = encoder.encode(state)
    encoder.rollback()
    assert equal(encoder.residual, before)
    assert encoder.encode(state) == first
    encoder.commit()
    encoder.rollback()
    assert not equal(encoder.residual, before)


@pytest.mark.parametrize("settle", [Encoder.commit, Encoder.rollback, lambda encoder: None])
def test_an_encoder_resumes_from_its_state(settle):
    one, state = Encoder(0.5), {"w": torch.randn(500)}
    for _ in range(3):
        one.encode(state)
    other = Encoder(0.5)
    other.load(one.state())
    settle(one)
    settle(other)
    assert [one.encode(state) for _ in range(2)] == [other.encode(state) for _ in range(2)]
    with pytest.raises(DecodeError):
        other.load(one.state()[:-1])


def test_a_given_residual_is_sent():
    lost = {"w": torch.full((10,), 5.0)}
    assert decode(Encoder(8, residual=lost).encode({"w": torch.zeros(10)}))["w"].mean() > 4


def test_another_base_is_refused():
    base, state = {"w": torch.zeros(40)}, {"w": torch.ones(40)}
    data = encode(state, base)
    for wrong in (None, {"w": torch.full((40,), 1e-9)}, {"v": torch.zeros(40)}, {"w": torch.zeros(41)}):
        with pytest.raises(DecodeError) as refused:
            decode(data, wrong)
        assert refused.value.code in ("base", "layout")


def test_a_receiver_bounds_what_it_decodes():
    data = encode({"w": torch.zeros(1 << 20)})
    assert len(data) < 1000
    with pytest.raises(DecodeError) as refused:
        decode(data, limit=1 << 20)
    assert refused.value.code == "length"


@pytest.mark.parametrize("bits", [None, 0.5])
def test_tampered_bytes_are_refused(bits):
    rng, base = random.Random(0), {"w": torch.randn(30, 30), "n": torch.arange(5)}
    data = encode({"w": base["w"] + 0.1, "n": base["n"] + 1}, base, bits)
    for _ in range(2000):
        bad = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        for wrong in (bytes(bad), data[: rng.randrange(len(data))], data + b"x"):
            if wrong != data:
                with pytest.raises(DecodeError):
                    decode(wrong, base)


def test_other_frames_and_kinds_of_array_are_refused():
    from fewbytes.codec.states import Arrays, NumberedArrays
    from fewbytes.wire import Dense, pack

    for payload in (
        Dense({"w": torch.ones(1)}), Arrays(Dense({"w": torch.ones(1, dtype=torch.bfloat16)})),
        NumberedArrays(Dense({"1": torch.ones(1)})),
    ):  # fmt: skip
        with pytest.raises(DecodeError) as refused:
            decode(bytes(pack(payload)))
        assert refused.value.code == "type"


def golden() -> dict[str, dict]:
    """By file in tests/codec/frames, with its format's folder: its base, and what it holds."""
    indices = {path.parent.name: json.loads(path.read_text()) for path in FRAMES.glob("*/index.json")}
    return {f"{folder}/{name}": about for folder, index in indices.items() for name, about in index.items()}


@pytest.mark.parametrize("name", sorted(golden()))
def test_what_was_written_once_is_read(name):
    """Bytes that an earlier version wrote: every later one reads them."""
    about = golden()[name]
    base = decode((FRAMES / name).with_name(about["base"]).read_bytes()) if about["base"] else None
    received = decode((FRAMES / name).read_bytes(), base)
    values = received if isinstance(received, dict) else {str(i): value for i, value in enumerate(received)}
    layout = {key: [str(value.dtype).removeprefix("torch."), list(value.shape)] for key, value in values.items()}
    assert layout == about["layout"]
    assert [float(value.reshape(-1).sum()) for value in values.values()] == about["sums"]
