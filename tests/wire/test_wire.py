"""The wire carries every payload bit for bit in as few bytes as claimed, and answers any other bytes with FrameError.

`python tests/wire/test_wire.py` unpacks the bombs under a memory limit and prints what each one costs.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import json
import math
import os
import struct
import subprocess
import sys
import time
import tracemalloc
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
import zstandard
from assembling import LONG, assemble, body_of, header_tree, padded, take_apart, varint
from blake3 import blake3
from crc32c import crc32c
from golden_frames import examples, held_by, stored, tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from payloads import Album, Choice, Directions, Few, Parcel, Rounded
from rich.console import Console
from torch import Tensor

from fewbytes.base.errors import MethodError
from fewbytes.base.rate import Rate
from fewbytes.base.state import State
from fewbytes.wire import (
    Base,
    Bits,
    Counted,
    Dense,
    Entry,
    Frame,
    FrameError,
    Images,
    Layout,
    Lossy,
    Masked,
    Packages,
    Quantised,
    Signs,
    TopK,
    base_of,
    counted,
    pack,
    pack_state,
    payload,
    unpack,
    unpack_state,
)
from fewbytes.wire.fields import check_finite
from fewbytes.wire.inspect import inspect_frame
from fewbytes.wire.layout import DTYPES
from fewbytes.wire.schema import check_fields, leaves_of
from fewbytes.wire.values import flat_words

CODES = {
    "truncated", "magic", "version", "checksum", "length", "header", "type", "layout", "base", "coding", "padding",
}  # fmt: skip
FLOATS = [dtype for dtype in DTYPES.values() if dtype.is_floating_point]
MiB, GiB = 1 << 20, 1 << 30
slow = settings(deadline=None, suppress_health_check=list(HealthCheck))


@payload
class Whole:
    model: Dense


@payload
class Part:
    model: Masked


@payload
class Note:
    raw: bytes


@payload
class Notes:
    raw: list[bytes]


@payload
class Tables:
    tensors: dict[int, Tensor]
    numbers: list[int]


@dataclass(frozen=True, eq=False)
class Point:
    x: float
    name: str | None


@payload
class Everything:
    nothing: None
    flag: bool
    whole: int
    real: float
    text: str
    raw: bytes
    ints: list[int]
    pair: tuple[int, str]
    many: tuple[float, ...]
    none: tuple[()]
    table: dict[str, int]
    deep: dict[int, list[bytes | None]]
    keyed: dict[bytes, tuple[bool, ...]]
    maybe: int | None
    twice: list[list[int | None] | None]
    point: Point
    points: list[Point]
    state: State
    states: list[State]
    tensor: Tensor
    perhaps: Tensor | None
    dense: Dense
    masked: Masked
    by_client: dict[int, Dense]


# ---------------------------------------------------------------------------------------------------- comparing


def bits(value: Tensor) -> bytes:
    return torch.empty(value.numel(), dtype=value.dtype).copy_(value.reshape(-1)).view(torch.uint8).numpy().tobytes()


def same_tensor(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def same_state(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(same_tensor(a[name], b[name]) for name in a)


def pieces(value: Masked) -> State:
    """The kept values of each entry."""
    return dict(zip(value.mask, value.values.split([int(m.sum()) for m in value.mask.values()]), strict=True))


def same(a: Any, b: Any) -> bool:
    """Equal in type and in every bit; named tensors in any order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return same_tensor(a, b)
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, Masked):
        empty = not a.mask and not b.mask  # no entries, so no type of values either
        return same_state(a.mask, b.mask) and (empty or a.values.dtype == b.values.dtype) and same_state(
            pieces(a), pieces(b)
        )  # fmt: skip
    if isinstance(a, TopK):
        return (
            (a.shapes, a.depth) == (b.shapes, b.depth)
            and same_state(a.indices, b.indices)
            and same_state(a.values, b.values)
        )
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict) and a and all(isinstance(v, Tensor) for v in a.values()):
        return same_state(a, b)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def fits(kind: Any, value: Any) -> bool:
    """Whether a value is of the type its field promises, all the way down."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if type(None) in args:
        return value is None or any(fits(a, value) for a in args if a is not type(None))
    if origin is list:
        return type(value) is list and all(fits(args[0], v) for v in value)
    if origin is dict:
        return type(value) is dict and all(fits(args[0], k) and fits(args[1], v) for k, v in value.items())
    if origin is tuple:
        kinds = [args[0]] * len(value) if len(args) == 2 and args[1] is ... else args
        return type(value) is tuple and len(kinds) == len(value) and all(map(fits, kinds, value))
    if kind is Masked:
        ones = sum(int(m.sum()) for m in value.mask.values())
        return all(m.dtype == torch.bool for m in value.mask.values()) and value.values.shape == (ones,)
    if kind is Dense:
        return type(value) is Dense and fits(dict[str, torch.Tensor], value.state)
    if kind is Bits:
        return all(b.dtype == torch.bool for b in value.bits.values())
    if kind is Quantised:
        types = {level.dtype for level in value.levels.values()}
        grids = all(g.dtype == torch.float32 and g.shape == (2,) for g in value.grid.values())
        return value.levels.keys() == value.grid.keys() and grids and types <= {torch.uint8, torch.uint16}
    if kind is TopK:
        return 0 < value.depth <= 16 and all(
            i.dtype == torch.int64 and i.shape == value.values[n].shape[:1] and bool((i.diff() > 0).all())
            and (not len(i) or 0 <= i[0] <= i[-1] < math.prod(value.shapes[n][: value.depth]))
            for n, i in value.indices.items()
        )  # fmt: skip
    if kind is Packages:
        return all(v.shape == value.single.shapes[n] for n, v in value.dense().items()) and all(
            fits(type(part), part) for part in (value.single, value.whole, value.magnitudes)
        )
    if kind is Signs:
        signs = all(s.dtype == torch.int8 and bool((s.abs() <= 1).all()) for s in value.signs.values())
        return signs and value.scale.dtype == torch.float32 and value.scale.shape == (1,)
    if kind is Images:
        return value.pixels.dtype == torch.uint8 and value.pixels.ndim == 4
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return type(value) is kind and all(fits(k, getattr(value, name)) for name, k in hints.items())
    return type(value) is kind


def test_the_comparison_sees_every_bit() -> None:
    zero, nan = torch.tensor([0.0]), torch.tensor([math.nan])
    assert same(nan, nan.clone())
    assert not same(zero, -zero)
    assert not same(nan, torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32))
    assert not same(1, True)
    assert not same(0.0, -0.0)
    assert not same(zero, torch.zeros(1, 1))
    assert not same(Dense({"a": zero}), Dense({"a": -zero}))
    mask = {"a": torch.tensor([True, False])}
    assert not same(Masked(mask, zero), Masked({"a": ~mask["a"]}, zero))
    assert not same(Masked(mask, zero), Masked(mask, -zero))
    assert fits(dict[int, list[bytes | None]], {1: [b"", None]})
    assert not fits(dict[int, list[bytes | None]], {True: []})
    assert not fits(list[int], [True])


# ---------------------------------------------------------------------------------------------------- round trips


def round_trip(x: Any, *, layout: Layout | None = None, base: Base | None = None, coded: bool = True) -> Any:
    """Pack and unpack, with all that is claimed of both; returns what came back."""
    frame = pack(x, layout=layout, base=base, coded=coded)
    data = bytes(frame)
    assert len(frame) == len(data)
    buffer = bytearray(b"\xaa" * (len(data) + 9))
    assert frame.write_into(memoryview(buffer)) == len(data)
    assert buffer == data + b"\xaa" * 9
    assert frame.digest == data[-16:] == blake3(data[:-16]).digest(16)
    held = None if base is None else Base(base.digest, {name: value.clone() for name, value in base.tensors.items()})
    y = unpack(type(x), data, layout=layout, base=held)
    assert same(x, y)
    moved = bytearray(b"\xaa" + data)  # at an odd address, as it may come out of a connection's buffer
    z = unpack(type(x), memoryview(moved)[1:], layout=layout, base=held)
    moved[:] = bytes(len(moved))
    assert same(x, z)  # its tensors own their memory
    return y


def special(dtype: torch.dtype) -> list[int]:
    """Bit patterns at the edges: zeros, subnormals, infinities, quiet and signalling NaNs; the integers' bounds."""
    width = 8 * dtype.itemsize
    top = 1 << (width - 1)
    if not dtype.is_floating_point:
        return [0, 1, top - 1, top, 2 * top - 1]
    infinity = int.from_bytes(bits(torch.tensor([math.inf], dtype=dtype)), "little")
    positive = [0, 1, infinity - 1, infinity, infinity + 1, top - 1]
    return positive + [top | p for p in positive]


SHAPES = st.one_of(
    st.sampled_from([(), (0,), (3, 0, 2), (1,), (700,), (40, 30), (4, 3, 5, 6), (0, 5), (2, 3, 16, 16)]),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
)


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
    """Any type, shape, bits and memory order."""
    dtype = draw(st.sampled_from(list(DTYPES.values()))) if dtype is None else dtype
    shape = draw(SHAPES) if shape is None else shape
    size, width = math.prod(shape), dtype.itemsize
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    how = draw(st.sampled_from(["bits", "special", "usual", "constant"]))
    if how == "bits":
        value = tensor(np.frombuffer(rng.bytes(size * width), np.uint8), dtype, shape)
    elif how == "usual":
        value = torch.from_numpy(rng.normal(0, 1 if dtype.is_floating_point else 20, size)).to(dtype).reshape(shape)
    else:
        edges = np.array(special(dtype), f"u{width}")
        value = tensor(rng.choice(edges if how == "special" else edges[:1], size), dtype, shape)
    match draw(st.sampled_from(["plain", "channels last", "transposed", "strided"])):
        case "channels last" if value.ndim == 4:
            return value.contiguous(memory_format=torch.channels_last)
        case "transposed" if value.ndim > 1:
            return value.transpose(0, -1).contiguous().transpose(0, -1)
        case "strided" if value.ndim:
            return torch.stack([value, value], dim=-1)[..., 1]
    return value


def near(value: Tensor, seed: int) -> Tensor:
    """The same but for small differences, as a trained model is to the one it started from."""
    if value.dtype == torch.bool:
        return value.clone()
    noise = np.random.default_rng(seed).integers(-9, 10, value.numel()).astype(f"i{value.dtype.itemsize}")
    return tensor(np.frombuffer(bits(value), noise.dtype) + noise, value.dtype, value.shape)


NAMES = st.one_of(
    st.sampled_from(["w", "b", "layer.0.weight", "", "Größe", "a\tfloat32\t2\nb", "x" * 300]), st.text(max_size=6)
)


@st.composite
def packets(draw: st.DrawFn, dtype: torch.dtype | None = None) -> tuple[State, Layout | None, Base | None]:
    """A state to send, the model's layout and the message it answers, each with more or less of the same entries."""
    model = draw(st.dictionaries(NAMES, tensors(dtype), max_size=5))
    seed = draw(st.integers(0, 1 << 32))
    chosen = draw(st.permutations(list(model)))[: draw(st.integers(0, len(model)))]
    base: State = {}
    state: State = {}
    for name in chosen:
        match draw(st.sampled_from(["same", "near", "other", "none", "other shape", "other type"])):
            case "same":
                base[name] = state[name] = model[name]
            case "near":
                base[name], state[name] = model[name], near(model[name], seed)
            case "other":
                base[name], state[name] = model[name], draw(tensors(model[name].dtype, tuple(model[name].shape)))
            case "none":
                state[name] = model[name]
            case "other shape":
                base[name], state[name] = model[name].unsqueeze(0), model[name]
            case _:
                base[name], state[name] = model[name].bool().to(torch.int8), model[name]
    if draw(st.booleans()):
        state |= draw(st.dictionaries(NAMES, tensors(dtype), max_size=2))
    layout = draw(st.sampled_from([None, Layout.of(model)]))
    held = draw(st.sampled_from([None, Base(blake3(draw(st.binary(max_size=4))).digest(), base)]))
    return state, layout, held


def in_order(state: State, layout: Layout | None) -> list[str]:
    """The names in the order they travel: the layout's where it has them all, else their own."""
    known = () if layout is None else layout.entries
    if all(Entry(n, str(v.dtype).removeprefix("torch."), tuple(v.shape)) in known for n, v in state.items()):
        return [e.name for e in known if e.name in state]
    return list(state)


@slow
@given(packets(), st.booleans())
def test_dense_comes_back_bit_for_bit(packet: tuple[State, Layout | None, Base | None], coded: bool) -> None:
    state, layout, base = packet
    back = round_trip(Whole(Dense(state)), layout=layout, base=base, coded=coded)
    assert list(back.model.dense()) == in_order(state, layout)
    assert all(value.is_contiguous() for value in back.model.dense().values())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dense_values_of_a_mask_keep_every_bit(dtype: torch.dtype) -> None:
    for word in special(dtype):
        value = tensor(np.array([word], f"u{dtype.itemsize}"), dtype, (1,))
        for state in ({"a": value}, {"a": value.repeat(3)}, {"a": value.reshape(())}):
            mask = {"a": torch.ones(state["a"].shape, dtype=torch.bool)}
            assert same_state(Masked.of(state, mask).dense(), state)


DENSITIES = [0.0, 0.003, 0.05, 0.5, 0.95, 0.997, 1.0]


@slow
@given(st.sampled_from(list(DTYPES.values())).flatmap(packets), st.data(), st.booleans())
def test_masked_comes_back_bit_for_bit(
    packet: tuple[State, Layout | None, Base | None], data: st.DataObject, coded: bool
) -> None:
    state, layout, base = packet
    density = data.draw(st.sampled_from(DENSITIES))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    mask = {n: torch.from_numpy(rng.random(v.numel()) < density).view(v.shape) for n, v in state.items()}
    sent = Masked.of(state, mask)
    back = round_trip(Part(sent), layout=layout, base=base, coded=coded).model
    assert list(back.mask) == in_order(state, layout)
    dense = back.dense()
    for name, value in state.items():
        assert same_tensor(dense[name], torch.where(mask[name], value, torch.zeros((), dtype=value.dtype)))
    assert counted(back) == Counted(sent.values.nbytes, sum(v.numel() for v in state.values()))


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 255, 256, 257, 1000, 70_001])
def test_masks_of_every_density(size: int, density: float, coded: bool) -> None:
    rng = np.random.default_rng(size)
    mask = {"m": torch.from_numpy(rng.random(size) < density), "n": torch.zeros(size, dtype=torch.bool)}
    state = {name: torch.from_numpy(rng.standard_normal(size)).float() for name in mask}
    layout = Layout.of(state)
    round_trip(Part(Masked.of(state, mask)), layout=layout, coded=coded)
    inverse = {name: ~m for name, m in mask.items()}
    round_trip(Part(Masked.of(state, inverse)), layout=layout, coded=coded)


@slow
@given(
    st.lists(st.one_of(st.integers(0, 3), st.sampled_from([253, 254, 255, 256, 509, 510, 511, 765])), max_size=30),
    st.integers(0, 1200),
    st.booleans(),
)
def test_masks_with_any_gaps(gaps: list[int], rest: int, flip: bool) -> None:
    """Gaps at and around the bytes that escape, in masks sparse enough to be coded as gaps."""
    mask = np.zeros(sum(gaps) + len(gaps) + rest + 9 * len(gaps), bool)
    mask[np.cumsum(np.array(gaps, int) + 1) - 1] = True
    mask ^= flip
    value = Masked({"m": torch.from_numpy(mask)}, torch.arange(int(mask.sum()), dtype=torch.int64))
    round_trip(Part(value))


@pytest.mark.parametrize("gaps", [[2, 5], [0, 7], [3, 4], [6, 6, 6, 7], [5]], ids=str)
def test_masks_whose_gaps_take_more_bytes_than_their_bits(gaps: list[int]) -> None:
    """One place in eight, and a last gap that escapes; the gaps would compress better, but are not to be sent."""
    mask = np.zeros(8 * 2001, bool)
    mask[np.cumsum(np.random.default_rng(0).choice(gaps, 2000) + 1) - 1] = True
    mask[-1] = True
    for one in (mask, ~mask):
        round_trip(Part(Masked({"m": torch.from_numpy(one)}, torch.ones(int(one.sum())))))


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
@pytest.mark.parametrize("coded", [True, False])
def test_tensors_longer_than_a_block(dtype: torch.dtype, coded: bool) -> None:
    """Coding goes block by block; entries end inside blocks, and at their edges."""
    rng = np.random.default_rng(1)
    sizes = {"a": 1 << 16, "b": 5, "c": (1 << 16) + 3, "none": 0, "d": 3 << 16}
    edges = np.array(special(dtype), f"u{dtype.itemsize}")
    state = {name: tensor(rng.choice(edges, n), dtype, (n,)) for name, n in sizes.items()}
    layout = Layout.of(state)
    round_trip(Whole(Dense(state)), layout=layout, coded=coded)
    held = {name: near(value, 3) for name, value in state.items() if name != "b"}
    round_trip(Whole(Dense(state)), layout=layout, base=Base(bytes(range(32)), held), coded=coded)


INTS = st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.sampled_from([-(1 << 63), (1 << 63) - 1, -1, 0]))
REALS = st.one_of(st.floats(), st.sampled_from([math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324]))
POINTS = st.builds(Point, REALS, st.none() | st.text(max_size=5))
STATES = st.dictionaries(NAMES, tensors(), max_size=2)
DENSES = STATES.map(Dense)
MASKEDS = st.dictionaries(NAMES, tensors(torch.float32), max_size=2).map(Masked.nonzero)
EVERYTHING = st.builds(
    Everything,
    nothing=st.none(),
    flag=st.booleans(),
    whole=INTS,
    real=REALS,
    text=st.text(max_size=9),
    raw=st.binary(max_size=40),
    ints=st.lists(INTS, max_size=3),
    pair=st.tuples(INTS, st.text(max_size=3)),
    many=st.lists(REALS, max_size=3).map(tuple),
    none=st.just(()),
    table=st.dictionaries(st.text(max_size=3), INTS, max_size=3),
    deep=st.dictionaries(INTS, st.lists(st.none() | st.binary(max_size=3), max_size=3), max_size=2),
    keyed=st.dictionaries(st.binary(max_size=3), st.lists(st.booleans(), max_size=2).map(tuple), max_size=2),
    maybe=st.none() | INTS,
    twice=st.lists(st.none() | st.lists(st.none() | INTS, max_size=2), max_size=2),
    point=POINTS,
    points=st.lists(POINTS, max_size=2),
    state=STATES,
    states=st.lists(STATES, max_size=2),
    tensor=tensors(),
    perhaps=st.none() | tensors(),
    dense=DENSES,
    masked=MASKEDS,
    by_client=st.dictionaries(INTS, DENSES, max_size=2),
)


@slow
@given(EVERYTHING, packets(), st.booleans())
def test_fields_of_every_type_come_back(
    x: Everything, packet: tuple[State, Layout | None, Base | None], coded: bool
) -> None:
    state, layout, base = packet
    x = dataclasses.replace(x, dense=Dense(state))
    assert fits(Everything, round_trip(x, layout=layout, base=base, coded=coded))


def test_a_base_is_the_message_that_is_answered() -> None:
    """The first tensor of each name in it; a masked value counts with its zeros."""
    rng = np.random.default_rng(0)
    first = {"a": tensor(rng.integers(0, 1 << 30, 2000), torch.int64, (2000,))}
    mask = {"m": torch.arange(3000) % 2 == 0}
    part = Masked.of({"m": torch.from_numpy(rng.standard_normal(3000)).float()}, mask)
    message = dataclasses.replace(EXAMPLE, dense=Dense(first), masked=part, by_client={1: Dense({"a": part.values})})
    frame = pack(message)
    base = base_of(frame.digest, unpack(Everything, bytes(frame)))
    assert same_state(dict(base.tensors), {**first, **part.dense()})
    reply = Whole(Dense({"a": first["a"] + 1, "m": part.dense()["m"]}))
    assert len(pack(reply, base=base)) < 0.2 * len(pack(reply))
    round_trip(reply, base=base)
    round_trip(Part(Masked.of(part.dense(), {"m": ~mask["m"]})), base=base)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nothing", 0), ("flag", 1), ("whole", True), ("whole", 1.0), ("real", "1"), ("real", True), ("text", b"a"),
        ("raw", "a"), ("ints", [None]), ("pair", (1, 2)), ("maybe", "1"), ("tensor", None), ("point", 3),
        ("dense", {}), ("tensor", torch.zeros(1, dtype=torch.complex64)), ("deep", {1: ["a"]}), ("state", {"a": 1.0}),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_named(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"Everything\.{field}|cannot travel"):
        pack(dataclasses.replace(EXAMPLE, **{field: value}))


@pytest.mark.parametrize(
    "kind",
    [
        complex, list, dict, Any, object, np.ndarray, torch.nn.Parameter, int | str, Literal["a"], set[int],
        list[complex], dict[str, complex], dict[Tensor, int], tuple[int, object], complex | None, Mapping[str, Tensor],
    ],
)  # fmt: skip
def test_a_payload_with_a_field_that_cannot_travel_is_refused_when_it_is_made(kind: Any) -> None:
    with pytest.raises(MethodError, match=r"^Bad\.field: .*None, bool, int"):
        payload(type("Bad", (), {"__annotations__": {"whole": int, "field": kind}}))


@dataclasses.dataclass
class Unpackable:
    where: Path


def test_a_field_of_a_field_is_looked_at_too() -> None:
    with pytest.raises(MethodError, match=r"^Unpackable\.where: Path"):
        payload(type("Holder", (), {"__annotations__": {"parts": list[Unpackable]}}))


@payload
class Tree:
    """Of itself, and of a class that is defined later: looked at when it is first used."""

    branches: list[Tree]
    leaf: Leaf | None


@payload
class Spoilt:
    leaf: Leaf
    wrong: Later


@payload
class Leaf:
    value: float


Later = complex


def test_types_of_later_lines_are_looked_at_when_they_are_used() -> None:
    check_fields(Tree)
    tree = Tree([Tree([], Leaf(1.5))], None)
    assert unpack(Tree, bytes(pack(tree))).branches[0].leaf.value == 1.5
    with pytest.raises(MethodError, match=r"^Spoilt\.wrong: complex"):
        check_fields(Spoilt)


def test_integers_beyond_64_bits_and_things_that_are_no_payload_do_not_travel() -> None:
    for number in (1 << 64, -(1 << 63) - 1):
        with pytest.raises((TypeError, OverflowError)):
            pack(dataclasses.replace(EXAMPLE, whole=number))
    for thing in (Whole, {"a": 1}, [1], None, 3):
        with pytest.raises(TypeError):
            pack(thing)


# ---------------------------------------------------------------------------------------------------- few bytes


def test_weights_take_at_most_86_percent() -> None:
    weights = {"w": torch.from_numpy(np.random.default_rng(0).normal(0, 0.05, 1_000_000)).float()}
    size = len(pack(Whole(Dense(weights)), layout=Layout.of(weights)))
    assert size <= 0.86 * 4e6


def test_weights_near_their_base_take_at_most_66_percent() -> None:
    rng = np.random.default_rng(0)
    held = torch.from_numpy(rng.normal(0, 0.05, 1_000_000)).float()
    weights = {"w": held + torch.from_numpy(rng.normal(0, 0.0005, 1_000_000)).float()}
    layout = Layout.of(weights)
    size = len(pack(Whole(Dense(weights)), layout=layout, base=Base(bytes(32), {"w": held})))
    assert size <= 0.66 * 4e6


def test_a_base_that_does_not_help_costs_nothing() -> None:
    rng = np.random.default_rng(0)
    held, new = (torch.from_numpy(rng.normal(0, 0.05, 100_000)).float() for _ in range(2))
    assert len(pack(Whole(Dense({"w": new})), base=Base(bytes(32), {"w": held}))) <= 8 + len(
        pack(Whole(Dense({"w": new})))
    )


@slow
@given(packets(), st.booleans())
def test_coding_never_costs(packet: tuple[State, Layout | None, Base | None], masked: bool) -> None:
    state, layout, base = packet
    floats = {name: value for name, value in state.items() if value.dtype == torch.float32}
    x = Part(Masked.nonzero(floats)) if masked else Whole(Dense(state))
    assert len(pack(x, layout=layout, base=base)) <= len(pack(x, layout=layout, coded=False)) + 64


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
@pytest.mark.parametrize("size", [1, 3, 20, 100, 1000, 10_000])
def test_coding_noise_never_costs(dtype: torch.dtype, size: int) -> None:
    noise = tensor(np.frombuffer(np.random.default_rng(0).bytes(size * dtype.itemsize), np.uint8), dtype, (size,))
    for state in ({"a": noise}, {"a": noise, "b": noise.clone(), "none": noise[:0]}):
        base = Base(bytes(32), {name: near(value, 1) for name, value in state.items()})
        uncoded = len(pack(Whole(Dense(state)), coded=False))
        assert len(pack(Whole(Dense(state)))) <= uncoded + 2
        assert len(pack(Whole(Dense(state)), base=base)) <= uncoded + 10  # with a base hash, and rounding of the cost


# -------------------------------------------------------------------------------- frames made by hand, from the prose


@dataclass(frozen=True)
class Case:
    """A good frame and what its receiver knows."""

    cls: type[Any]
    frame: bytes
    layout: Layout | None = None
    base: Base | None = None

    def unpack(self, data: bytes | None = None, **options: Any) -> Any:
        return unpack(
            self.cls, self.frame if data is None else data, **{"layout": self.layout, "base": self.base, **options}
        )

    def outcome(self, data: bytes, **options: Any) -> Any:
        """The value in these bytes, or the FrameError they end in; any other exception fails the test."""
        try:
            return self.unpack(data, **options)
        except FrameError as error:
            return error

    def refuse(self, data: bytes, **options: Any) -> str:
        """The code with which these bytes are refused. Fails if they are not."""
        error = self.outcome(data, **options)
        accepted = not isinstance(error, FrameError)
        assert not accepted
        assert error.code in CODES
        assert len(str(error)) < 400
        assert "\n" not in str(error)
        return error.code

    def accept_or_refuse(self, data: bytes, **options: Any) -> bool:
        """Whether these bytes were accepted; then they hold a value of the class, which can travel again."""
        value = self.outcome(data, **options)
        if isinstance(value, FrameError):
            assert value.code in CODES
            return False
        assert fits(self.cls, value)
        assert same(value, self.unpack(bytes(pack(value, layout=self.layout, base=self.base))))
        return True


EXAMPLE = Everything(
    nothing=None, flag=True, whole=-5, real=0.1, text="Gruß", raw=b"raw bytes", ints=[1, -(1 << 63)], pair=(1, "a"),
    many=(math.inf, -0.0), none=(), table={"a": 1, "b": 2}, deep={7: [b"x", None]}, keyed={b"k": (True, False)},
    maybe=3, twice=[None, [None, 4]], point=Point(1.5, None), points=[Point(2.5, "p")],
    state={"s": torch.arange(6).reshape(2, 3), "t": torch.ones(2, dtype=torch.bool)}, states=[{}],
    tensor=torch.arange(5, dtype=torch.int16), perhaps=torch.ones(2, 2), dense=Dense({"d": torch.zeros(0, 3)}),
    masked=Masked.nonzero({"m": torch.tensor([0.0, 1.0, 2.0])}), by_client={3: Dense({"e": torch.ones(1)})},
)  # fmt: skip


def photographs(n: int, channels: int, size: int, noise: int = 3) -> Tensor:
    """Smooth images that differ from channel to channel, and a little noise."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, 0.4, (n, channels, 2, 1, 1))
    rows, columns = np.mgrid[:size, :size]
    waves = 128 + 100 * np.sin(angle[:, :, 0] * rows + angle[:, :, 1] * columns)
    return torch.from_numpy((waves + rng.integers(0, noise, waves.shape)).astype(np.uint8))


def by_hand(words: list[int], width: int, shift: int, of: int) -> bytes:
    """The plane of `of` bytes that starts at bit `shift`."""
    return b"".join((w >> shift & (1 << 8 * of) - 1).to_bytes(of, "little") for w in words)


def zigzag(words: Sequence[int], held: Sequence[int], dtype: torch.dtype) -> list[int]:
    """Differences to the base as the first version of the format has them, computed one number at a time."""
    top = 1 << (8 * dtype.itemsize - 1)

    def ordered(w: int) -> int:
        if not dtype.is_floating_point:
            return w
        return w if w < top else -(w - top) - 1

    differences = [(ordered(w) - ordered(b) + top) % (2 * top) - top for w, b in zip(words, held, strict=True)]
    return [2 * d if d >= 0 else -2 * d - 1 for d in differences]


def as_before(value: Whole, layout: Layout, base: Base) -> bytes:
    """A frame of version 1: differences to the base through zstandard, each byte of them a plane."""
    sections, groups = [], []
    for dtype in dict.fromkeys(t.dtype for t in value.model.state.values()):
        names = [name for name, t in value.model.state.items() if t.dtype == dtype]
        words, held = (
            [int(w) for name in names for w in flat_words(state[name])] for state in (value.model.state, base.tensors)
        )
        coded = zigzag(words, held, dtype)
        sections += [zstandard.compress(by_hand(coded, 8 * dtype.itemsize, 8 * i, 1)) for i in range(dtype.itemsize)]
        groups.append([2, [1] * dtype.itemsize])
    return assemble("Whole", [[True, groups]], sections, major=1, layout=layout.hash, base=base.digest[:16])


@cache
def cases() -> dict[str, Case]:
    """Frames of about 2 kB: dense and masked, coded and not, of the layout and not, based and not."""
    rng = np.random.default_rng(0)
    held = {
        "w": torch.from_numpy(rng.normal(0, 0.05, (20, 25))).float(),
        "b": torch.from_numpy(rng.normal(0, 0.05, 60)).float(),
        "steps": torch.tensor(7),
    }
    weights = {"w": held["w"] + 1e-4, "b": held["b"] * 1.01, "steps": torch.tensor(8)}
    layout = Layout.of(weights)
    some = {"w": weights["w"], "steps": weights["steps"]}
    moved = {
        "w": held["w"] * (1 + 0.1 * torch.from_numpy(rng.random((20, 25)) < 0.6)),
        "b": weights["b"],
        "steps": held["steps"],
    }
    dense, wide = Whole(Dense(weights)), {"v": torch.from_numpy(rng.normal(0, 0.05, 6000)).float()}
    base = Base(blake3(b"message").digest(), held)
    wide_base = Base(blake3(b"message").digest(), {"v": wide["v"] - 1e-4})
    half = Part(Masked.of(wide, {"v": torch.from_numpy(rng.random(6000) < 0.08)}))
    rest = Part(Masked.of({"v": torch.ones(5000)}, {"v": torch.from_numpy(rng.random(5000) < 0.95)}))
    packed = Part(Masked.of({"v": wide["v"][:900]}, {"v": torch.from_numpy(rng.random(900) < 0.4)}))
    wide_layout = Layout.of(wide)
    skewed = Choice(Bits({"v": torch.from_numpy(rng.random(6000) < 0.08)}))
    half_of = Choice(Bits({"v": torch.from_numpy(rng.random(4000) < 0.5)}))
    floats = {"w": weights["w"], "b": weights["b"]}
    float_layout = Layout.of(floats)
    uneven = {name: value**3 for name, value in floats.items()}
    rounded, finer = Rounded(Quantised.of(uneven, 8)), Rounded(Quantised.of(floats, 16))

    def chosen(size: int, density: float) -> Tensor:
        return torch.from_numpy(np.flatnonzero(rng.random(size) < density))

    few = Few(TopK.of(wide, {"v": chosen(6000, 0.04)}))
    fewer = Few(TopK.of(weights, {"w": chosen(500, 0.2), "b": chosen(60, 0.9)}))
    patchy = Few(TopK.of(wide, {"v": torch.cat([torch.arange(130), 6 * chosen(1000, 0.2)[30:]])}))
    kernels = Few(TopK.of({"v": wide["v"][:1800].view(10, 20, 3, 3)}, {"v": chosen(200, 0.1)}, depth=2))
    convolution = {"c": wide["v"][:1800].view(10, 20, 3, 3), "b": wide["v"][1800:1830]}
    parcel = Parcel(
        Packages(
            TopK.of(convolution, {"c": chosen(1800, 0.04), "b": chosen(30, 0.5)}),
            TopK.of(convolution, {"c": 2 * chosen(100, 0.1)}, depth=2),
            TopK.of(
                {"c": torch.rand(10, 20, generator=torch.Generator().manual_seed(0))}, {"c": torch.tensor([1, 7, 9])}
            ),
            torch.tensor([0b111111111, 0b101010101]),
            torch.tensor([1, 0, 1], dtype=torch.uint8),
        )
    )
    parcel_layout = Layout.of(convolution)
    signs = {"w": weights["w"], "v": wide["v"], "b": torch.zeros(3)}
    signs_layout = Layout.of(signs)
    spiky, spiky_layout = (
        {**convolution, "steps": torch.tensor(7)},
        Layout.of({**convolution, "steps": torch.tensor(7)}),
    )
    spiky["b"] = spiky["b"] * torch.cat([torch.tensor([400.0]), torch.ones(29)])
    spiky_base = Base(blake3(b"message").digest(), {"c": 0.9 * convolution["c"], "b": spiky["b"]})
    part_of = Part(Masked.of(spiky, {"c": torch.from_numpy(rng.random((10, 20, 3, 3)) < 0.7)}))

    def rounded_to(step: float, value: Any, layout: Layout | None = None, base: Base | None = None) -> Case:
        lossy = Lossy(Rate(step=step), exact=set() if base is None else {"b"})
        return Case(type(value), bytes(pack(value, layout=layout, base=base, lossy=lossy)), layout, base)

    def of_format(version: int, name: str) -> Case:
        example = examples()[name]
        return Case(type(example.value), stored(name, version), example.layout, held_by(name, version))

    photos, drawings = Album(Images(photographs(5, 3, 8))), Album(Images(photographs(5, 2, 8)))
    return {
        "dense": Case(Whole, bytes(pack(dense, layout=layout)), layout),
        "dense uncoded": Case(Whole, bytes(pack(dense, layout=layout, coded=False)), layout),
        "dense based": Case(Whole, bytes(pack(dense, layout=layout, base=base)), layout, base),
        "dense based in part": Case(Whole, bytes(pack(Whole(Dense(moved)), layout=layout, base=base)), layout, base),
        "dense based before": Case(Whole, as_before(dense, layout, base), layout, base),
        "dense without layout": Case(Whole, bytes(pack(dense))),
        "dense in part": Case(Whole, bytes(pack(Whole(Dense(some)), layout=layout)), layout),
        "masked": Case(Part, bytes(pack(half, layout=wide_layout)), wide_layout),
        "masked uncoded": Case(Part, bytes(pack(packed, coded=False))),
        "masked packed": Case(Part, bytes(pack(packed))),
        "masked based": Case(Part, bytes(pack(half, layout=wide_layout, base=wide_base)), wide_layout, wide_base),
        "masked nearly full": Case(Part, bytes(pack(rest))),
        "bits": Case(Choice, bytes(pack(skewed, layout=wide_layout)), wide_layout),
        "bits without layout": Case(Choice, bytes(pack(half_of))),
        "quantised": Case(Rounded, bytes(pack(rounded, layout=float_layout)), float_layout),
        "quantised 16": Case(Rounded, bytes(pack(finer, layout=float_layout, coded=False)), float_layout),
        "quantised without layout": Case(Rounded, bytes(pack(finer))),
        "images": Case(Album, bytes(pack(photos))),
        "images grey": Case(Album, bytes(pack(drawings))),
        "images uncoded": Case(Album, bytes(pack(photos, coded=False))),
        "few": Case(Few, bytes(pack(few, layout=wide_layout)), wide_layout),
        "few patchy": Case(Few, bytes(pack(patchy, layout=wide_layout)), wide_layout),
        "few kernels": Case(Few, bytes(pack(kernels))),
        "few without layout": Case(Few, bytes(pack(fewer))),
        "packages": Case(Parcel, bytes(pack(parcel, layout=parcel_layout)), parcel_layout),
        "signs": Case(Directions, bytes(pack(Directions(Signs.of(signs)), layout=signs_layout)), signs_layout),
        "signs without layout": Case(Directions, bytes(pack(Directions(Signs.of(signs)), coded=False))),
        "rounded": rounded_to(0.1, Whole(Dense(spiky)), spiky_layout),
        "rounded based": rounded_to(0.3, Whole(Dense(spiky)), spiky_layout, spiky_base),
        "rounded without layout": rounded_to(0.01, Whole(Dense({"c": spiky["c"][:8], "h": spiky["b"].half()}))),
        "rounded masked": rounded_to(0.5, part_of, base=spiky_base),
        "everything": Case(Everything, bytes(pack(EXAMPLE, layout=layout)), layout),
        **{f"{name} of format {version}": of_format(version, name) for version, name in OLDER},
    }


OLDER = [
    (1, "rounded-reply"), (1, "update-reply"), (2, "few-coded"), (2, "model-reply"), (2, "packages"),
    (2, "rounded-reply"), (2, "rounded-update"), (2, "signs"), (2, "update-reply"),
]  # fmt: skip
"""Frames kept in git, by their format."""


ALL = pytest.mark.parametrize("name", list(cases()))


def header_of(name: str) -> Any:
    """What stands in the header for the case's one field."""
    return take_apart(cases()[name].frame)[1][0]


def test_the_cases_are_what_they_are_for() -> None:
    assert header_of("dense uncoded") == [True, [[0], [0]]]
    assert header_of("dense")[1][0][0] == 1
    assert 1 in header_of("dense")[1][0][1]
    assert header_of("dense based")[1][0][:2] == [4, [2, 0, 0, 560]]
    assert 1 in header_of("dense based")[1][0][2]
    assert header_of("dense based in part")[1][0][1][0] == 0
    assert len(header_of("dense based in part")[1][0][2]) == 3
    assert header_of("dense based before")[1][0][0] == 2
    assert header_of("dense in part")[0] == b"\x05"
    assert [entry[0] for entry in header_of("dense without layout")[0]] == ["w", "b", "steps"]
    assert header_of("masked")[1][0] == 1
    assert header_of("masked nearly full")[1][0] == 2
    assert header_of("masked packed")[1][0] == header_of("masked uncoded")[1][0] == 0
    assert header_of("masked based")[2][0] == 4
    assert header_of("bits")[1][0] == 1
    assert header_of("quantised")[:2] == [True, 8]
    assert 1 in header_of("quantised")[3][1]
    assert header_of("quantised 16") == [True, 16, [0], [0]]
    assert len(header_of("few")[2]) == len(header_of("few without layout")[2]) == 3
    assert header_of("few patchy")[2][0] == 1
    assert header_of("signs")[1][3] == 6500  # of 6503 the last three are zero
    assert header_of("images") == [[5, 3, 8, 8], None]
    assert header_of("images grey") == [[5, 2, 8, 8], None]
    assert header_of("images uncoded") == [[5, 3, 8, 8], [0]]
    assert header_of("rounded")[1][0][:2] == [6, b"\5"]
    assert [group[:2] for group in header_of("rounded without layout")[1]] == [[6, b"\1"]] * 2
    assert header_of("rounded based")[1][0][:2] == [6, b"\2"]
    assert header_of("rounded masked")[2][:2] == [6, b"\2"]
    assert all(300 < len(case.frame) < 2500 for case in cases().values())


@ALL
def test_frames_are_built_as_the_prose_says(name: str) -> None:
    case = cases()[name]
    kind, fields, sections, hashes = take_apart(case.frame)
    assert kind == case.cls.__name__
    assert assemble(kind, fields, sections, **hashes) == case.frame
    lengths = (4, 8) if hashes["major"] == 3 else (16, 16)
    assert hashes["layout"] == (b"" if case.layout is None else case.layout.hash[: lengths[0]])
    assert hashes["base"] == (b"" if case.base is None else case.base.digest[: lengths[1]])
    case.unpack()


def test_the_layouts_hash_is_what_the_prose_says() -> None:
    layout = Layout((Entry("w", "float32", (2, 3)), Entry("n", "int64", ())))
    told = msgspec.msgpack.encode([["w", "float32", [2, 3]], ["n", "int64", []]])
    assert layout.hash == hashlib.sha256(told).digest()[:16]
    one = Layout((Entry("a\tfloat32\t2\nb", "float32", (2,)),))
    assert one.hash != Layout((Entry("a", "float32", (2,)), Entry("b", "float32", (2,)))).hash
    assert layout.hash != Layout(layout.entries[::-1]).hash


def test_a_newer_version_is_not_read() -> None:
    kind, fields, sections, hashes = take_apart(cases()["dense"].frame)
    assert cases()["dense"].refuse(assemble(kind, fields, sections, **hashes | {"major": 4})) == "version"


@pytest.mark.parametrize("squeeze", [False, True])
@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
def test_numbers_are_coded_as_the_prose_says(dtype: torch.dtype, squeeze: bool) -> None:
    """Planes and differences computed one number at a time."""
    width = 8 * dtype.itemsize
    top = 1 << (width - 1)
    words, held = special(dtype) * 3, special(dtype)[::-1] * 3
    if dtype == torch.bool:
        words, held = [0, 1, 1, 0], [0, 1, 0, 1]

    def stored(planes: list[bytes]) -> list[bytes]:
        return [zstandard.compress(p) for p in planes] if squeeze else planes

    def tensor_of(values: list[int]) -> Tensor:
        return tensor(np.array(values, f"u{width // 8}"), dtype, (len(values),))

    entry = ["x", str(dtype).removeprefix("torch."), [len(words)]]
    rotated = [(w << 1 | w >> (width - 1)) & (2 * top - 1) if dtype.is_floating_point else w for w in words]
    cuts = [(0, 2), (16, 1), (24, 1)] if width == 32 else [(8 * i, 1) for i in range(width // 8)]
    planes = stored([by_hand(rotated, width, shift, of) for shift, of in cuts])
    frame = assemble("Whole", [[[entry], [[1, [int(squeeze)] * len(cuts)]]]], planes)
    assert same(unpack(Whole, frame), Whole(Dense({"x": tensor_of(words)})))

    planes = stored([by_hand(zigzag(words, held, dtype), width, 8 * i, 1) for i in range(width // 8)])
    digest = blake3(b"m").digest()
    frame = assemble("Whole", [[[entry], [[2, [int(squeeze)] * len(planes)]]]], planes, major=1, base=digest[:16])
    base = Base(digest, {"x": tensor_of(held)})
    assert same(unpack(Whole, frame, base=base), Whole(Dense({"x": tensor_of(words)})))

    kept = [(i, (w - b) % (2 * top)) for i, (w, b) in enumerate(zip(words, held, strict=True)) if w != b]
    middle = sum(0x80 << 8 * i for i in range(width // 8 - 1))
    changes = [(d + middle) % (2 * top) for _, d in kept]
    mask = by_hand([sum(1 << i for i, _ in kept)], 0, 0, (len(words) + 7) // 8)
    places = [0, int(squeeze), len(mask), len(kept)]
    for cut in [[(8 * i, 1) for i in range(width // 8)], *([cuts] if width == 32 else [])]:
        planes = [by_hand(changes, width, shift, of) for shift, of in cut]
        numbers = [4, places, [int(squeeze)] * len(cut)]
        frame = assemble("Whole", [[[entry], [numbers]]], stored([mask, *planes]), base=digest[:16])
        assert same(unpack(Whole, frame, base=base), Whole(Dense({"x": tensor_of(words)})))


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
def test_constant_planes_have_no_section(dtype: torch.dtype) -> None:
    """A flag of 2 and the byte, in planes of numbers and of differences; the lowest plane of two bytes has none."""
    width = dtype.itemsize
    entry = ["x", str(dtype).removeprefix("torch."), [5]]
    rotated = [3, 200, 255, 0, 7, 1, 128, 64][-width:] if width > 1 else [1]
    sections = [struct.pack("<H", rotated[0] + (rotated[1] << 8)) * 5] if width == 4 else []
    flags = [2 + byte for byte in rotated]
    flags = [0, *flags[2:]] if width == 4 else flags
    word = int.from_bytes(bytes(rotated), "little")
    if dtype.is_floating_point:
        word = word >> 1 | (word & 1) << 8 * width - 1
    expected = tensor(np.array([word] * 5, f"u{width}"), dtype, (5,))
    frame = assemble("Whole", [[[entry], [[1, flags]]]], sections)
    assert same(unpack(Whole, frame).model, Dense({"x": expected}))
    for flag in (258, 259, 1 << 40, -1, 2.0, True, None):
        case = Case(Whole, b"")
        assert case.refuse(assemble("Whole", [[[entry], [[1, [*flags[:-1], flag]]]]], sections)) == "header"
    assert Case(Whole, b"").refuse(assemble("Whole", [[[entry], [[1, flags]]]], [*sections, bytes(5)])) == "length"
    if width == 4:
        for flag in (2, 200):
            assert Case(Whole, b"").refuse(assemble("Whole", [[[entry], [[1, [flag, *flags[1:]]]]]])) == "header"

    base = Base(blake3(b"m").digest(16), {"x": expected})
    changed_words = [word, word, (word + 1) % (1 << 8 * width), word, (word + 1) % (1 << 8 * width)]
    if dtype == torch.bool:
        changed_words = [1, 1, 0, 1, 0]
    middles = (
        [2 + 0x81, *[2 + 0x80] * (width - 2), 2][:width] if width > 1 else [2 + (255 if dtype == torch.bool else 1)]
    )
    changes = [4, [0, 0, 1, 2], middles]
    frame = assemble("Whole", [[[entry], [changes]]], [b"\x14"], base=base.digest[:8])
    expected = tensor(np.array(changed_words, f"u{width}"), dtype, (5,))
    assert same(unpack(Whole, frame, base=base).model, Dense({"x": expected}))
    frame = assemble("Whole", [[[entry], [[4, [0, 0, 1, 0], middles]]]], [b"\0"], base=base.digest[:8])
    assert Case(Whole, b"", None, base).refuse(frame) == "header"  # no numbers, so no plane of equal bytes


def test_numbers_equal_to_the_base_have_no_section() -> None:
    """Its first tensor of that name; zeros for one of another type or shape."""
    held = Base(
        blake3(b"m").digest(16),
        {"x": torch.tensor([1.5, -0.0, math.nan]), "n": torch.arange(4), "other": torch.ones(2, 2)},
    )
    entries = [["x", "float32", [3]], ["n", "int64", [4]], ["other", "float32", [4]]]
    frame = assemble("Whole", [[entries, [[5], [5]]]], base=held.digest[:8])
    expected = {"x": held.tensors["x"], "n": held.tensors["n"], "other": torch.zeros(4)}
    assert same(unpack(Whole, frame, base=held).model, Dense(expected))
    case = Case(Whole, frame, None, held)
    for wrong in (None, Base(bytes(16), held.tensors)):
        assert case.refuse(frame, base=wrong) == "base"
    assert case.refuse(assemble("Whole", [[entries, [[5], [5]]]])) == "base"
    assert case.refuse(assemble("Whole", [[entries, [[5], [5]]]], [bytes(8)], base=held.digest[:8])) == "length"
    lacking = [["x", "float32", [2]], ["new", "float32", [3]]]
    assert case.refuse(assemble("Whole", [[lacking, [[5]]]], base=held.digest[:8])) == "base"
    for malformed in ([5, 0], [5, []], [5, [0]], [5.0], [[5]]):
        frame = assemble("Whole", [[entries, [malformed, [5]]]], base=held.digest[:8])
        assert case.refuse(frame) in {"header", "coding"}
    none = assemble("Whole", [[[["x", "float32", [0]]], [[5]]]], base=held.digest[:8])
    assert case.refuse(none) == "header"
    mask = Masked.of({"x": held.tensors["x"]}, {"x": torch.tensor([True, False, True])})
    frame = assemble("Part", [[entries[:1], [0, 0, 1, 2], [5]]], [b"\5"], base=held.digest[:8])
    assert same(unpack(Part, frame, base=held).model, mask)


MASK = [i in (0, 1, 256, 511, 767, 999) for i in range(1000)]
"""Gaps of 0, 0, 254, 254, 255 and 231."""
GAPS = bytes([0, 0, 254, 254, 255, 0, 231])


@pytest.mark.parametrize("squeeze", [False, True])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_masks_are_coded_as_the_prose_says(kind: int, squeeze: bool) -> None:
    mask = [not m for m in MASK] if kind == 2 else MASK
    data = GAPS if kind else bytes(sum(mask[8 * i + j] << j for j in range(8)) for i in range(125))
    ones, section = sum(mask), zstandard.compress(data) if squeeze else data
    numbers = np.arange(ones, dtype=np.int16)
    header = [[["x", "int16", [8, 125]]], [kind, int(squeeze), len(data), ones], [0]]
    frame = assemble("Part", [header], [section, numbers.tobytes()])
    expected = Masked({"x": torch.tensor(mask).reshape(8, 125)}, torch.from_numpy(numbers))
    assert same(unpack(Part, frame), Part(expected))


# ---------------------------------------------------------------------------------------------------- damaged bytes


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bits", "as run lengths before ones"), ("bits without layout", "as packed bits"),
        ("quantised", "levels of 8 bits"),
        ("few", "places of"), ("few without layout", "values:"), ("signs", "signs"),
        ("images", "5 images, 3x8x8: lossless WebP"), ("images uncoded", "5 images, 3x8x8: raw"),
    ],
)  # fmt: skip
def test_inspect_tells_of_them(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.frame").write_bytes(cases()[name].frame)
    console = Console(file=io.StringIO(), width=200)
    console.print(inspect_frame(tmp_path / "a.frame", {cases()[name].cls.__name__: cases()[name].cls}))
    assert words in console.file.getvalue()  # type: ignore[attr-defined]


@ALL
def test_every_truncation_is_refused(name: str) -> None:
    case = cases()[name]
    for length in range(len(case.frame)):
        case.refuse(case.frame[:length])


@ALL
def test_every_flipped_bit_is_refused(name: str) -> None:
    case = cases()[name]
    data = bytearray(case.frame)
    for i in range(len(data)):
        for bit in range(8):
            data[i] ^= 1 << bit
            case.refuse(data)
            data[i] ^= 1 << bit
    assert data == case.frame


@ALL
def test_bytes_too_many_are_refused(name: str) -> None:
    case = cases()[name]
    for more in (b"\0", b"\xff", bytes(7), bytes(8), bytes(64), case.frame[-32:], case.frame):
        case.refuse(case.frame + more)
        case.refuse(more + case.frame)


@slow
@given(st.binary(max_size=300), st.integers(0, 300))
def test_random_bytes_are_refused(noise: bytes, keep: int) -> None:
    for case in cases().values():
        case.refuse(noise)
        if case.frame[keep : keep + len(noise)] != noise:
            case.refuse(case.frame[:keep] + noise)
            case.refuse(case.frame[:keep] + noise + case.frame[keep + len(noise) :])


def test_nothing_is_refused_for_what_it_is() -> None:
    case = cases()["dense"]
    assert case.refuse(b"FEW") == case.refuse(case.frame[:20]) == "truncated"
    assert case.refuse(b"") == "magic"
    assert cases()["dense based before"].refuse(cases()["dense based before"].frame[:64]) == "truncated"
    assert case.refuse(b"\x93NUMPY" + case.frame[6:]) == "magic"
    assert case.refuse(assemble("long\n" * 100_000, [])) == "type"


# --------------------------------------------------------------------- hostile bytes: every checksum true, the rest not


WRONG: list[Any] = [
    None, True, False, 0, 1, 2, 3, 4, -1, 7, 255, 1000, (1 << 62), (1 << 63) - 1, (1 << 64) - 1, -(1 << 63),
    0.0, 1.0, 2.0, math.nan, math.inf, "", "x", "float32", "float99", b"", b"\x00", b"\x01", b"\x07", b"\xff" * 9,
    [], [0], [1], [None], [[]], [0, 0], [1, [0, 0, 0]], [2, [1, 1, 1, 1]], [0, 0, 0, 0], [1, 1, 1, 1], [True, []],
    [[], []], [["", "float32", []]], {}, {0: 0}, {"a": []}, msgspec.msgpack.Ext(5, b"x"),
]  # fmt: skip
"""Nodes to put in the place of others: every type of msgpack, and each number that means something somewhere."""


def paths(tree: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Where every node of a tree stands."""
    yield path
    if isinstance(tree, list):
        for i, child in enumerate(tree):
            yield from paths(child, (*path, i))


def node(tree: Any, path: tuple[int, ...]) -> Any:
    for i in path:
        tree = tree[i]
    return tree


def changed(tree: Any, path: tuple[int, ...], change: Callable[[list[Any], int], None]) -> Any:
    """A copy of the tree whose node at `path` was changed in the array it stands in."""
    holder = [copy.deepcopy(tree)]
    within = node(holder, (0, *path[:-1])) if path else holder
    change(within, path[-1] if path else 0)
    return holder[0] if holder else None


def put(value: Any) -> Callable[[list[Any], int], None]:
    return lambda within, i: within.__setitem__(i, value)


def drop(within: list[Any], i: int) -> None:
    del within[i]


def double(within: list[Any], i: int) -> None:
    within.insert(i, within[i])


def nest(within: list[Any], i: int) -> None:
    within[i] = [within[i]]


def swap(within: list[Any], i: int) -> None:
    within[i - 1], within[i] = within[i], within[i - 1]


def rebuilt(case: Case, tree: Any) -> bytes:
    """The case's frame with another header, and all checksums true."""
    sections, hashes = take_apart(case.frame)[2:]
    return assemble(None, None, sections, header=msgspec.msgpack.encode(tree), **hashes)


def tree_of(case: Case) -> list[Any]:
    return header_tree(case.frame)


CONSTANT_PLANES = {
    **{name: {(1, 0, 1, 1, 1, i) for i in range(8)} for name in ("dense", "dense in part")},
    **{name: {(1, 0, 1, 0, 2, 2)} for name in ("dense based", "dense based in part")},
}
"""Where in the headers of cases the bytes of planes stand: they may be others."""


@pytest.mark.parametrize(
    "name",
    [
        "dense", "dense uncoded", "dense based", "dense based in part", "dense in part", "masked", "masked based",
        "masked packed", "bits",
        "quantised", "quantised 16", "few", "few patchy", "signs",
    ],
)  # fmt: skip
def test_no_node_of_a_header_can_be_another(name: str) -> None:
    """Where the layout says everything, every node has one right value, and every other is refused."""
    case = cases()[name]
    tree = tree_of(case)
    true = msgspec.msgpack.encode(tree)
    free = {(1, 0, 0, 0, 0), (1, 0, 0, 0, 2), (1, 0, 0, 0, 2, 0)} if name == "masked packed" else set()
    free |= {(1, 0, 1)} if name.startswith("few") else set()  # any depth does for one dimension
    free |= CONSTANT_PLANES.get(name, set())
    count = 0
    for path in paths(tree):
        changes = [put(value) for value in WRONG] + [drop, double, nest, swap]
        for change in changes if path else [put(value) for value in WRONG] + [nest]:
            tampered = changed(tree, path, change)
            if msgspec.msgpack.encode(tampered) != true and path not in free:
                case.refuse(rebuilt(case, tampered))
                count += 1
    assert count > 500


@pytest.mark.parametrize(
    "name",
    [
        "everything", "dense based before", "dense without layout", "masked uncoded", "masked nearly full",
        "bits without layout", "quantised without layout", "images", "images grey",
        "few without layout", "few kernels", "signs without layout", "packages",
        "rounded", "rounded based", "rounded without layout", "rounded masked",
        *(f"{name} of format {version}" for version, name in OLDER),
    ],
)  # fmt: skip
def test_any_node_of_a_header_is_accepted_or_refused(name: str) -> None:
    """Names, types, shapes and plain fields may be others; what is accepted is of the class and can travel again."""
    case = cases()[name]
    tree = tree_of(case)
    outcomes = []
    for path in paths(tree):
        changes = [put(value) for value in WRONG] + [drop, double, nest, swap]
        for change in changes if path else changes[:-3]:
            outcomes.append(case.accept_or_refuse(rebuilt(case, changed(tree, path, change) if path else [])))
    assert not all(outcomes)


TREES = st.recursive(
    st.one_of(st.sampled_from(WRONG), INTS, REALS, st.text(max_size=4), st.binary(max_size=4)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers() | st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@settings(slow, max_examples=300)
@given(st.sampled_from(list(cases())), st.data())
def test_mutated_headers_are_accepted_or_refused(name: str, data: st.DataObject) -> None:
    case = cases()[name]
    tree: Any = tree_of(case)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(paths(tree))))
        elsewhere = node(tree, data.draw(st.sampled_from(list(paths(tree)))))
        change = data.draw(st.one_of(TREES.map(put), st.just(put(elsewhere)), st.sampled_from([double, nest, swap])))
        if path and data.draw(st.integers(0, 4)) == 0:
            change = drop
        tree = changed(tree, path, change)
        if not isinstance(tree, list):
            tree = [tree]
    try:
        frame = rebuilt(case, tree)
    except OverflowError:  # an integer that msgpack cannot hold
        return
    case.accept_or_refuse(frame)


@ALL
def test_headers_with_flipped_bits_and_true_checksums(name: str) -> None:
    case = cases()[name]
    sections, hashes = take_apart(case.frame)[2:]
    header = bytearray(msgspec.msgpack.encode(tree_of(case)))
    for i in range(len(header)):
        for bit in range(8):
            header[i] ^= 1 << bit
            case.accept_or_refuse(assemble(None, None, sections, header=bytes(header), **hashes))
            header[i] ^= 1 << bit


@ALL
def test_sections_with_flipped_bits_and_true_checksums(name: str) -> None:
    """What decoders see when a sender lies: wrong numbers or a refusal, nothing else."""
    case = cases()[name]
    kind, fields, sections, hashes = take_apart(case.frame)
    for k, section in enumerate(sections):
        for i in range(0, 8 * len(section), 1 + 8 * len(section) // 400):
            damaged = bytearray(section)
            damaged[i // 8] ^= 1 << i % 8
            case.accept_or_refuse(assemble(kind, fields, [*sections[:k], bytes(damaged), *sections[k + 1 :]], **hashes))


@ALL
def test_sections_missing_or_extra_are_refused(name: str) -> None:
    case = cases()[name]
    kind, fields, sections, hashes = take_apart(case.frame)
    for k in range(len(sections)):
        case.refuse(assemble(kind, fields, sections[:k] + sections[k + 1 :], **hashes))
        for more in (b"", b"x", sections[k]):
            case.refuse(assemble(kind, fields, [*sections[:k], more, *sections[k:]], **hashes))
    for more in (b"", b"x" * 8):
        assert case.refuse(assemble(kind, fields, [*sections, more], **hashes)) == "length"
        body = true_body(case) + more + bytes(8)
        assert case.refuse(assemble(kind, fields, sections, body=body, **hashes)) == "length"


@ALL
def test_sections_of_other_lengths_are_refused(name: str) -> None:
    case = cases()[name]
    kind, fields, sections, hashes = take_apart(case.frame)
    webp = case.cls is Album and fields[0][1] is None  # says itself where it ends, in a byte before its last, perhaps
    for k, section in enumerate(sections):
        near = [] if webp else [section[:-1], section + b"\0", section * 2]
        for other in (section[: len(section) // 2], section[1:], b"", *near):
            if other != section:
                case.refuse(assemble(kind, fields, [*sections[:k], other, *sections[k + 1 :]], **hashes))


def true_body(case: Case) -> bytes:
    """The bytes of a good frame between its header and its digest."""
    _, _, sections, hashes = take_apart(case.frame)
    if hashes["major"] < 3:
        return b"".join(map(padded, sections))
    return body_of(sections, case.frame.index(header := msgspec.msgpack.encode(tree_of(case))) + len(header))


@ALL
def test_padding_that_is_not_zero_is_refused(name: str) -> None:
    case = cases()[name]
    kind, fields, sections, hashes = take_apart(case.frame)
    body, older = bytearray(true_body(case)), hashes["major"] < 3
    first = case.frame.index(header := msgspec.msgpack.encode(tree_of(case))) + len(header)
    at = 0
    for section in sections:
        before = 0 if older else (-(first + at) % 8 if len(section) >= LONG else 0)
        after = -len(section) % 8 if older else 0
        for i in [*range(at, at + before), *range(at + len(section), at + len(section) + after)]:
            body[i] = 1
            assert case.refuse(assemble(kind, fields, sections, body=bytes(body), **hashes)) == "padding"
            body[i] = 0
        at += before + len(section) + after
    for i in range(-len(header) % 8 if older else 0):
        gap = bytearray(-len(header) % 8)
        gap[i] = 0x80
        assert case.refuse(assemble(kind, fields, sections, after_header=bytes(gap), **hashes)) == "padding"


def test_long_sections_are_aligned_in_the_frame() -> None:
    for length in (1, 100, LONG - 1, LONG, LONG + 1, 5000):
        frame = bytes(pack(Note(bytes(range(256)) * 20 + b"x" * length)))
        assert frame.index(bytes(range(256))) % 8 == 0
        assert unpack(Note, frame).raw[-length:] == b"x" * length


@pytest.mark.parametrize("extra", range(8))
def test_zeros_before_a_long_section_are_zeros(extra: int) -> None:
    """A section of less than 1,024 bytes has none before it, a longer one as many as it needs, and they are checked."""
    short, long = b"s" * (1023 if extra % 2 else extra), b"l" * (LONG + extra)
    fields, table = [[len(short), len(long)]], [len(short), len(long)]
    front = len(assemble("Notes", fields, table=table, body=b"")) - 16 + len(short)
    gap = -front % 8
    frame = assemble("Notes", fields, table=table, body=short + bytes(gap) + long)
    assert unpack(Notes, frame).raw == [short, long]
    assert bytes(pack(Notes([short, long]))) == frame
    case = Case(Notes, frame)
    for i in range(gap):
        zeros = bytearray(gap)
        zeros[i] = 1 << extra
        assert case.refuse(assemble("Notes", fields, table=table, body=short + bytes(zeros) + long)) == "padding"
    for n in set(range(9)) - {gap}:
        body = short + bytes(n) + long
        assert case.refuse(assemble("Notes", fields, table=table, body=body)) in {"length", "padding"}
    before = -(front - len(short)) % 8
    if before and short:
        assert case.refuse(assemble("Notes", fields, table=table, body=bytes(before) + short + long)) == "length"


@pytest.mark.parametrize("version", [v for v in range(64) if v != 3])
def test_other_versions_are_refused(version: int) -> None:
    """Before anything else of the frame is read, whatever hashes it has; `FEWB` is the older magic."""
    case = cases()["dense"]
    for flags in (0, 64, 128, 192):
        frame = bytearray(case.frame)
        frame[3] = version + flags
        expected = "checksum" if frame[3] == ord("B") else "version"
        assert case.refuse(frame) == expected
        frame[-16:] = blake3(bytes(frame[:-16])).digest(16)
        assert case.refuse(frame) == expected


def test_the_headers_length_has_one_form() -> None:
    """Groups of seven bits, the lowest first, no more than it needs, and within the frame."""
    header = msgspec.msgpack.encode(["Note", [200], [200]])
    longer = msgspec.msgpack.encode(["Notes", [[3] * 130], [3] * 130])
    assert len(header) < 128 < len(longer) < 1 << 14
    assert same(
        unpack(Note, assemble(None, None, [b"r" * 200], header=header, header_length=bytes([len(header)]))),
        Note(b"r" * 200),
    )
    two = bytes([len(longer) % 128 + 128, len(longer) // 128])
    frame = assemble(None, None, [b"abc"] * 130, header=longer, header_length=two)
    assert unpack(Notes, frame).raw == [b"abc"] * 130
    assert bytes(pack(Notes([b"abc"] * 130))) == frame
    case = Case(Note, b"")
    malformed = [
        b"", bytes([len(header) + 128]), bytes([len(header) + 128, 0]), bytes([len(header) + 128, 128, 0]),
        bytes([len(header) + 1]), bytes([len(header) - 1]), b"\xff" * 9 + b"\x01", b"\x80" * 9 + b"\x02", b"\x80" * 10,
    ]  # fmt: skip
    for told in malformed:
        frame = assemble(None, None, [b"r" * 200], header=header, header_length=told)
        assert case.refuse(frame) in {"length", "header"}
    for end in (b"\x80", b"\xff" * 8, b"\x05", b""):  # nothing follows
        whole = b"FEW\x03" + end
        assert case.refuse(whole + blake3(whole).digest(16)) in {"length", "header", "truncated"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"magic": b"FEX"}, "magic"), ({"major": 4}, "version"), ({"major": 0}, "version"), ({"major": 63}, "version"),
        ({"header_length": varint(MiB + 1)}, "length"), ({"header_length": varint((1 << 63) - 1)}, "length"),
        ({"header_length": b"\xff" * 9}, "length"), ({"header_length": b"\x80" * 400}, "length"),
        ({"header_length": varint(0)}, "header"), ({"header": b""}, "header"),
        ({"layout": b"\1" * 4}, "layout"), ({"base": b"\1" * 8}, "base"),
    ],
)  # fmt: skip
def test_fronts_that_lie_are_refused(change: dict[str, Any], code: str) -> None:
    case = cases()["dense based"]
    kind, fields, sections, hashes = take_apart(case.frame)
    assert case.refuse(assemble(kind, fields, sections, **{**hashes, **change})) == code


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"minor": 0, "flags": 1}, "version"), ({"flags": 1 << 15}, "version"),
        ({"reserved": 1}, "version"), ({"header_length": (1 << 32) - 1}, "length"), ({"header_length": 0}, "length"),
        ({"header_length": MiB + 1}, "length"), ({"body_length": (1 << 64) - 1}, "length"),
        ({"body_length": 1 << 63}, "length"), ({"body_length": 0}, "length"), ({"layout": b"\1" * 16}, "layout"),
        ({"base": b"\1" * 16}, "base"), ({"header": b""}, "header"), ({"after_header": bytes(8)}, "length"),
        ({"header_checksum": 7}, "checksum"), ({"prelude_checksum": 7}, "checksum"),
    ],
)  # fmt: skip
def test_older_preludes_that_lie_are_refused(change: dict[str, Any], code: str) -> None:
    case = cases()["dense based before"]
    kind, fields, sections, hashes = take_apart(case.frame)
    assert case.refuse(assemble(kind, fields, sections, **{**hashes, **change})) == code


def test_a_frame_of_nothing_takes_32_bytes() -> None:
    assert len(pack(Dense({}))) <= 32
    layout, base = cases()["dense based"].layout, cases()["dense based"].base
    assert layout is not None
    assert base is not None
    same_again = pack(Whole(Dense(dict(base.tensors))), layout=Layout.of(base.tensors), base=base)
    assert len(same_again) <= 48
    assert header_tree(bytes(same_again)) == ["Whole", [[True, [[5], [5]]]]]


def test_a_long_header_is_refused_even_if_it_is_there() -> None:
    header = msgspec.msgpack.encode(["Note", ["x" * MiB], []])
    assert Case(Note, b"").refuse(assemble(None, None, header=header)) == "length"


@ALL
def test_frames_for_another_receiver_are_refused(name: str) -> None:
    case = cases()[name]
    other = Layout.of({"other": torch.zeros(3)})
    if case.layout is not None:
        assert {case.refuse(case.frame, layout=wrong) for wrong in (None, other)} == {"layout"}
    if case.base is not None:
        stranger = Base(blake3(b"another message").digest(), case.base.tensors)
        assert {case.refuse(case.frame, base=wrong) for wrong in (None, stranger)} == {"base"}
        lacking = Base(case.base.digest, {})
        assert case.refuse(case.frame, base=lacking) == "base"
    for cls in {Whole, Part, Note, Everything} - {case.cls}:
        assert dataclasses.replace(case, cls=cls).refuse(case.frame) == "type"
    kind, fields, sections, hashes = take_apart(case.frame)
    for cls in (Whole, Part, Note, Everything):
        if [field.type for field in dataclasses.fields(cls)] != [field.type for field in dataclasses.fields(case.cls)]:
            dataclasses.replace(case, cls=cls).refuse(assemble(cls.__name__, fields, sections, **hashes))
    if case.layout is not None and name != "everything":
        hidden = assemble(kind, fields, sections, **{**hashes, "layout": b""})
        assert case.refuse(hidden) == "header"
    if case.base is not None:
        hidden = assemble(kind, fields, sections, **{**hashes, "base": b""})
        assert case.refuse(hidden) == "base"


@pytest.mark.parametrize(
    "entries",
    [
        b"", b"\x01\x00", b"\x07", b"\x08", b"\xff", bytes(1000), False, None, 0, 7, "w", [["w"]], [["w", "float32"]],
        [["w", "float32", [2], 0]], [["w", "float32", 2]], [["w", "float32", ["2"]]], [["w", "float32", [2.0]]],
        [["w", "float32", [True]]], [["w", "float32", [-1]]], [["w", "float32", [-1, -2]]], [["w", "complex64", [2]]],
        [["w", "float", [2]]], [["w", "torch.float32", [2]]], [["w", "Float32", [2]]], [[3, "float32", [2]]],
        [[None, "float32", [2]]], [["w", None, [2]]], [["w", "float32", [1] * 17]], [["w", "float32", [2]]] * 2,
        [["w", "int8", [8]], ["w", "float32", [2]]], [["w", "float32", [1 << 62]]], [["w", "float32", [(1 << 64) - 1]]],
        [["w", "float32", [1 << 31, 1 << 31]]], [["w", "float32", [1 << 63] * 16]], [["w", "float32", [0, 1 << 62, 4]]],
        [["w", "float32", [1 << 39, 1 << 39, 0]]], [["w", "float32", [0, (1 << 63) - 1]]], [["w", "float32", [0]]],
        [["w", "bool", [8]]],
    ],
)  # fmt: skip
def test_malformed_entries_are_refused(entries: Any) -> None:
    """A body of two floats; a bitset over a model of three entries."""
    model = Layout.of({"w": torch.zeros(2), "v": torch.zeros(2), "u": torch.zeros(2)})
    data = struct.pack("<ff", 1.0, -2.0)
    for groups in ([[0]], [[0], [0]], []):
        Case(Whole, b"", model).refuse(assemble("Whole", [[entries, groups]], [data], layout=model.hash))
    for mask, ones in ((b"\x03", 2), (b"", 0)):
        part = assemble("Part", [[entries, [0, 0, len(mask), ones], [0]]], [mask, data], layout=model.hash)
        Case(Part, b"", model).refuse(part)
    fine = assemble("Whole", [[[["w", "float32", [1, 2]]], [[0]]]], [data], layout=model.hash)
    assert same(unpack(Whole, fine, layout=model).model.state["w"], torch.tensor([[1.0, -2.0]]))


@pytest.mark.parametrize(
    "numbers",
    [
        [], None, 0, [None], [3], [-1], [True], [False], [0.0], [1.0], [0, []], [0, [0]], [1], [2], [1, []], [1, 0],
        [1, [0, 0]], [1, [0, 0, 0, 0]], [1, [0, 0, 2]], [1, [0, 0, -1]], [1, [0, 0, True]], [1, [0, 0, False]],
        [1, [0, 0, 1.0]], [1, [0, 0, None]], [1, [0, 0, 0], 0], [2, [0, 0, 0]], [2, [0, 0, 0, 0]], [1, [1, 0, 0]],
        [1, [0, 1, 0]], {}, "planes", b"\x01",
    ],
)  # fmt: skip
def test_malformed_codings_of_numbers_are_refused(numbers: Any) -> None:
    entries = [["w", "float32", [2]]]
    planes = [bytes(4), bytes(2), bytes(2)]
    for sections in (planes, [bytes(8)], [], [*planes, bytes(2)], [bytes(2)] * 4):
        Case(Whole, b"").refuse(assemble("Whole", [[entries, [numbers]]], sections))
    for groups in ([], [[0], [0]], [numbers, numbers], numbers):
        Case(Whole, b"").refuse(assemble("Whole", [[entries, groups]], [bytes(8)]))
    empty = [["w", "float32", [0]]]
    for sections in ([], [b""], [b""] * 3, [b""] * 4):
        Case(Whole, b"").refuse(assemble("Whole", [[empty, [numbers]]], sections))
    assert unpack(Whole, assemble("Whole", [[entries, [[1, [0, 0, 0]]]]], planes)).model.state["w"].tolist() == [0, 0]


def test_truth_values_are_zero_or_one() -> None:
    for value in (2, 3, 128, 255):
        for coding in ([0], [1, [0]]):
            frame = assemble("Whole", [[[["w", "bool", [3]]], [coding]]], [bytes([0, 1, value])])
            assert Case(Whole, b"").refuse(frame) == "coding"


PACKED = bytes(sum(MASK[8 * i + j] << j for j in range(8)) for i in range(125))


@pytest.mark.parametrize(
    ("header", "section"),
    [
        ([1, 0, 7, 6], bytes([0, 0, 254, 254, 255, 1, 231])),  # runs past the end by one
        ([1, 0, 7, 6], bytes([0, 0, 254, 254, 255, 254, 254])),
        ([1, 0, 8, 6], GAPS + b"\xff"),  # 255 with nothing after it
        ([1, 0, 7, 6], bytes([0, 0, 254, 254, 231, 0, 255])),
        ([1, 0, 7, 6], b"\xff" * 7),
        ([1, 0, 7, 7], GAPS), ([1, 0, 7, 5], GAPS), ([1, 0, 7, 0], GAPS), ([1, 0, 7, -6], GAPS),  # wrong ones
        ([1, 0, 7, 994], GAPS), ([2, 0, 7, 6], GAPS), ([2, 0, 7, 995], GAPS), ([1, 0, 6, 6], GAPS[:-1]),
        ([1, 0, 6, 6], GAPS), ([1, 0, 8, 6], GAPS), ([1, 0, -7, 6], GAPS), ([1, 0, 1 << 62, 6], GAPS),
        ([1, 0, 7, 1 << 62], GAPS), ([1, 0, 7, 6, 0], GAPS), ([1, 0, 7], GAPS), ([1, 7, 6], GAPS), (7, GAPS),
        ([1, 1, 7, 6], GAPS), ([1, 2, 7, 6], GAPS), ([1, -1, 7, 6], GAPS), ([1, False, 7, 6], GAPS),
        ([True, 0, 7, 6], GAPS), ([1.0, 0, 7, 6], GAPS), ([1, 0, 7.0, 6], GAPS), ([1, 0, 7, 6.0], GAPS),
        ([3, 0, 7, 6], GAPS), ([-1, 0, 7, 6], GAPS), ([None, 0, 7, 6], GAPS), ([1, 0, 7, None], GAPS),
        ([1, 0, 200, 200], bytes(200)),  # more bytes than packed bits take
        ([1, 0, 1000, 1000], bytes(1000)), ([2, 0, 1000, 0], bytes(1000)),
        ([0, 0, 125, 5], PACKED), ([0, 0, 125, 7], PACKED), ([0, 0, 124, 6], PACKED[:-1]),
        ([0, 0, 126, 6], PACKED + b"\0"), ([0, 0, 125, 6], PACKED[:-1]), ([0, 0, 125, 1001], PACKED),
        ([0, 0, 125, -1], PACKED), ([0, 0, -125, 6], PACKED), ([0, 1, 125, 6], PACKED), ([0, 2, 125, 6], PACKED),
        ([1, 0, 0, 0], b"\0"), ([1, 1, 0, 0], b""), ([1, 1, 0, 0], zstandard.compress(b"")),
        ([1, 1, 0, 0], zstandard.compress(b"") + b"hidden"),
    ],
)  # fmt: skip
def test_malformed_masks_are_refused(header: Any, section: bytes) -> None:
    """The mask of `MASK`, a thousand places; the right headers are [0, 0, 125, 6] and [1, 0, 7, 6]."""
    for ones in (0, 5, 6, 7, 200, 994, 995, 1000):
        frame = assemble("Part", [[[["x", "int8", [1000]]], header, [0]]], [section, bytes(ones)][: 1 + (ones > 0)])
        Case(Part, b"").refuse(frame)


@pytest.mark.parametrize("size", [1, 7, 9, 15, 1001])
def test_bits_after_a_masks_end_are_zero(size: int) -> None:
    data = bytearray((size + 7) // 8)
    data[-1] = 0x80
    for flag, section in ((0, bytes(data)), (1, zstandard.compress(data))):
        for ones in {0, min(1, size)}:
            header = [[["x", "int8", [size]]], [0, flag, len(data), ones], [0]]
            assert Case(Part, b"").refuse(assemble("Part", [header], [section, bytes(ones)][: 1 + ones])) == "padding"


def test_masked_values_are_of_one_type_and_fit_their_mask() -> None:
    two = [["x", "int8", [4]], ["y", "uint8", [4]]]
    assert Case(Part, b"").refuse(assemble("Part", [[two, [0, 0, 1, 8], [0]]], [b"\xff", bytes(8)])) == "type"
    one = [["x", "int8", [8]]]
    for n in (0, 6, 8, 14):
        assert Case(Part, b"").refuse(assemble("Part", [[one, [0, 0, 1, 7], [0]]], [b"\x7f", bytes(n)])) == "length"


def test_sections_do_not_reach_back() -> None:
    """Lengths that add up to the body's by way of a negative one: the second section would lie in the header."""
    body = b"sections"
    assert Case(Notes, b"").refuse(assemble("Notes", [[0, 8, 8]], table=[-8, 8, 8], body=body)) == "length"

    def older(checksum: int) -> bytes:
        table = [[-8, 0], [8, checksum], [8, crc32c(body)]]
        return assemble("Notes", [[0, 8, 8]], major=2, table=table, body=body)

    end = older((1 << 32) - 1)[-48:-40]  # of the header: the table's last entry, and padding
    assert end == older(crc32c(end))[-48:-40]
    assert Case(Notes, b"").refuse(older(crc32c(end))) == "length"


def test_repeated_entries_are_refused() -> None:
    def frames(names: list[str]) -> list[Case]:
        entries = [[name, "int8", [4]] for name in names]
        whole = assemble("Whole", [[entries, [[0]]]], [bytes(8)])
        part = assemble("Part", [[entries, [0, 0, 1, 8], [0]]], [b"\xff", bytes(8)])
        return [Case(Whole, whole), Case(Part, part)]

    for case in frames(["a", "b"]):
        case.unpack()
    assert {case.refuse(case.frame) for case in frames(["a", "a"])} == {"header"}


def test_repeated_keys_are_refused() -> None:
    case = cases()["everything"]
    tree = tree_of(case)
    at = [f.name for f in dataclasses.fields(Everything)].index("table")
    for pairs in ([["a", 1], ["a", 1]], [["a", 1], ["b", 2], ["a", 3]]):
        assert case.refuse(rebuilt(case, changed(tree, (1, at), put(pairs)))) == "type"


# ------------------------------------------------------------------------------------------------ bombs


def zstd_of_zeros(blocks: int, told: int | None, window: int = 0x38) -> bytes:
    """`blocks` times 128 KiB of zeros in four bytes each, with a told content size (none: unknown)."""
    last = [i == blocks - 1 for i in range(blocks)]
    size = b"" if told is None else told.to_bytes(8, "little")
    front = b"\x28\xb5\x2f\xfd" + bytes([0x00 if told is None else 0xC0, window]) + size
    return front + b"".join(((128 << 10) << 3 | 1 << 1 | end).to_bytes(3, "little") + b"\0" for end in last)


def bombs() -> dict[str, tuple[Case, bytes, int]]:
    """Small frames that would take much memory or time: name to receiver, bytes and limit."""
    model = Layout.of({"w": torch.zeros(131_072, dtype=torch.uint8)})
    here = Case(Whole, b"", model)
    masked = Case(Part, b"", Layout.of({"w": torch.zeros(8 * 131_072, dtype=torch.uint8)}))
    honest, lying = zstd_of_zeros(8192, GiB), zstd_of_zeros(8192, 131_072)
    found: dict[str, tuple[Case, bytes, int]] = {}

    def plane(section: bytes) -> bytes:
        return assemble("Whole", [[True, [[1, [1]]]]], [section], layout=model.hash)

    def mask(kind: int, nbytes: int, ones: int, section: bytes) -> bytes:
        assert masked.layout is not None
        header = [True, [kind, 1, nbytes, ones], [0]]
        return assemble("Part", [header], [section, bytes(8)], layout=masked.layout.hash)

    def foreign(shape: list[int], dtype: str, coding: Any, sections: list[bytes]) -> bytes:
        return assemble("Whole", [[[["f", dtype, shape]], [coding]]], sections)

    def add(name: str, case: Case, data: bytes, limit: int = GiB) -> None:
        found[name] = (case, data, limit)

    add("zstd, honest", here, plane(honest))
    add("zstd, lying", here, plane(lying))
    add("zstd, silent", here, plane(zstd_of_zeros(8192, None)))
    add("zstd, says much and holds little", here, plane(zstd_of_zeros(1, GiB)))
    add("zstd, says enough and holds nothing", here, plane(zstd_of_zeros(1, 131_072)[:14]))
    add("zstd, one block too many", here, plane(zstd_of_zeros(2, 131_072)))
    add("zstd, cut short", here, plane(zstd_of_zeros(1, 131_072)[:-1]))
    add("zstd, window of terabytes", here, plane(zstd_of_zeros(1, 131_072, 0xFF)[:-1]))
    add("zstd, window of 128 MiB, cut short", here, plane(zstd_of_zeros(1, 131_072, 0x88)[:-1]))
    add("zstd, another frame after it", here, plane(zstd_of_zeros(1, 131_072) + honest))
    add("zstd, bytes after it", here, plane(zstd_of_zeros(1, 131_072) + b"\0"))
    add("zstd, skippable frame before it", here, plane(b"\x50\x2a\x4d\x18\4\0\0\0abcd" + zstd_of_zeros(1, 131_072)))
    add("zstd, not at all", here, plane(bytes(100)))
    add("zstd, empty", here, plane(b""))
    for kind, nbytes, ones in ((0, 131_072, 0), (1, 131_072, 131_072), (2, 131_072, 7 * 131_072)):
        for label, section in (("honest", honest), ("lying", lying)):
            add(f"mask of kind {kind}, {label}", masked, mask(kind, nbytes, ones, section))
    add("mask of gaps only", masked, mask(1, 8 * 131_072, 8 * 131_072, zstd_of_zeros(8, 8 * 131_072)))
    add("foreign, beyond the limit", here, foreign([GiB], "uint8", [1, [1]], [honest]), MiB)
    add("foreign, beyond any limit", here, foreign([GiB], "float32", [1, [1, 1, 1]], [honest] * 3))
    add("foreign, nothing there", here, foreign([GiB], "uint8", [0], [b""]))
    add("foreign, nothing compressed there", here, foreign([GiB], "uint8", [1, [1]], [b""]))
    for shape in ([1 << 62], [1 << 31] * 2, [(1 << 64) - 1] * 16, [1 << 40] * 3, [0, 1 << 39, 1 << 39]):
        add(f"foreign of shape {shape}", here, foreign(shape, "float32", [0], [bytes(8)]))
        entries = [["f", "float32", shape]]
        part = assemble("Part", [[entries, [1, 0, 0, 0], [0]]], [b""])
        add(f"foreign mask of shape {shape}", Case(Part, b""), part)
    for shape in ([1 << 20, 3, 8, 8], [1, 3, 60, 60], [1 << 29, 1, 1, 1], [4, 3, 16404, 1], [4, 1, 1, 16404]):
        for label, sections in (("nothing", []), ("an empty sheet", [b""]), ("zeros", [bytes(40)])):
            add(f"images of shape {shape}, {label}", Case(Album, b""), assemble("Album", [[shape, None]], sections))
    for shape in ([GiB, 1, 1, 1], [1 << 15, 3, 1 << 15, 1], [1, 3, 1 << 20, 1 << 20], [1 << 62, 3, 8, 8]):
        add(f"images of shape {shape}", Case(Album, b""), assemble("Album", [[shape, None]], [bytes(40)]), MiB)
    for depth in (900, 10_000, 500_000):
        for where in (
            b"\x93%sx\x90\x90",
            b"\x93\xa5Whole%sx\x90",
            b"\x93\xa5Whole\x91%sx\x90",
            b"\x93\xa5Whole\x90%sx",
        ):
            for opening in (b"\x91", b"\x81\xa1k"):
                header = where.replace(b"%sx", opening * min(depth, 900_000 // len(opening)) + b"\xc0")
                name = f"nested {depth} deep in {where!r} by {opening!r}"
                add(name, here, assemble(None, None, header=header))
    for tag in (b"\xdd", b"\xc6", b"\xdb", b"\xdf", b"\xc9"):
        for where in (b"\x93%sx", b"\x93\xa5Whole%sx", b"\x93\xa5Whole\x91%sx", b"\x93\xa5Whole\x90%sx"):
            header = where.replace(b"%sx", tag + b"\xff\xff\xff\xff")
            add(f"{tag!r} of 2^32 - 1 in {where!r}", here, assemble(None, None, header=header))
    for length in ((1 << 64) - 1, 1 << 62, -1, -8, -(1 << 63), GiB):
        add(f"section of {length}", here, assemble("Whole", [[True, [[0]]]], table=[length]))
        add(f"bytes of {length}", Case(Note, b""), assemble("Note", [length], [b"abc"]))
    for item in (b"\x90", b"\x91\x00", b"\x80", b"\x81\x00\x00", b"\xcd\xff\xff", b"\xa2ab", b"\xd4\x05x"):
        for depth, n in ((0, (MiB - 32) // len(item)), (1, 100_000)):  # 64 bytes and more each once decoded
            fields = b"\x91" * depth + b"\xdd" + n.to_bytes(4, "big") + item * n
            add(f"{n} of {item!r}", here, assemble(None, None, header=b"\x93\xa5Whole" + fields + b"\x90"), 64 * MiB)
    table = b"\xdd" + (300_000).to_bytes(4, "big") + b"\x92\x00\x00" * 300_000
    add("sections of nothing", here, assemble(None, None, header=b"\x93\xa5Whole\x90" + table), 64 * MiB)
    empty, one, entry = [0, 0, 0, 0], [1, 0, 0, 0], [["w", "float32", [1, 1 << 33]]]
    add("few, no places", Case(Few, b""), assemble("Few", [[entry, 1, [0, 0, 1, 0], [0]]], [b"\0"]))
    add("few, gaps", Case(Few, b""), assemble("Few", [[[["w", "float32", [1 << 28, 4]]], 1, one, [0]]], [b""]))
    kernels = [["w", "float32", [1, 1, 1 << 27]]]
    for part in range(3):
        header = [[kernels if i == part else [], d, [0, 0, int(i == part), 0], [0]] for i, d in enumerate((16, 2, 16))]
        sections = [b"\0" if i == part else b"" for i in range(3)]
        add(
            f"packages, part {part}",
            Case(Parcel, b""),
            assemble("Parcel", [[*header, 0, [0], [0]]], sections),
            GiB // 2,
        )
    wide = [["w", "float64", [1 << 27]]]
    add("masked, nothing kept", Case(Part, b""), assemble("Part", [[wide, one, [0]]], [b""]))
    single = [["w", "float32", [1 << 28]]]
    add("bits, none", Case(Choice, b""), assemble("Choice", [[single, one]], [b""]))
    add("signs, none", Case(Directions, b""), assemble("Directions", [[single, one, empty, [0]]], [b"", b"", bytes(4)]))
    levels = zstd_of_zeros(1640, 1640 * 131_072)
    coarse = [["w", "float32", [1640 * 131_072]]]
    add("quantised, zeros", Case(Rounded, b""), assemble("Rounded", [[coarse, 8, [0], [1, [1]]]], [bytes(8), levels]))
    return found


def test_bombs_are_refused() -> None:
    for name, (case, data, limit) in bombs().items():
        assert len(data) < 2 * MiB, name
        assert case.refuse(data, limit=limit) in CODES, name


def test_what_a_bomb_says_is_fine_where_there_is_room() -> None:
    """They are refused for what they become, which takes nothing before anybody asks for it."""
    found = bombs()
    for name in ("few, no places", "masked, nothing kept", "bits, none", "signs, none", "quantised, zeros"):
        case, data, limit = found[name]
        assert case.refuse(data, limit=limit) == "length"
    case, data, _ = found["few, no places"]
    assert case.unpack(data, limit=1 << 40).model.shapes == {"w": (1, 1 << 33)}


def test_honest_headers_of_many_items_are_read() -> None:
    """A thousand tensors in a dict, a model of a thousand entries by name, numbers in a list; a state of any length."""
    tensors = {i: torch.full((3,), float(i)) for i in range(1000)}
    assert unpack(Tables, bytes(pack(Tables(tensors, []))), limit=MiB).tensors.keys() == tensors.keys()
    state = {f"blocks.{i}.attention.projection.weight": torch.zeros(2, 2) for i in range(1000)}
    assert same(unpack(Whole, bytes(pack(Whole(Dense(state)))), limit=MiB).model, Dense(state))
    numbers = Tables({}, list(range(200_000)))
    assert unpack(Tables, bytes(pack(numbers)), limit=1 << 40).numbers == numbers.numbers
    assert Case(Tables, b"").refuse(bytes(pack(numbers)), limit=MiB) == "length"


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_numbers_that_are_not_finite_are_found_without_making_them_dense(dtype: torch.dtype, wrong: float) -> None:
    shapes = {"w": (1 << 20, 1 << 20)}
    value, mask = torch.tensor([[1.0], [wrong]], dtype=dtype), {"w": torch.tensor([True, False, True])}
    places = {"w": torch.tensor([3, 9])}
    few = Few(TopK(shapes, places, {"w": value}))
    for payload_, name in ((few, "w"), (Part(Masked(mask, value.flatten())), "w"), (Whole(Dense({"w": value})), "w")):
        with pytest.raises(FrameError, match=f"'{name}' .*finite"):
            check_finite(leaves_of(payload_))
    check_finite(leaves_of(Few(TopK(shapes, places, {"w": torch.ones(2, 1, dtype=dtype)}))))
    greatest = torch.full((9,), torch.finfo(dtype).max, dtype=dtype)
    check_finite(leaves_of(Whole(Dense({"w": greatest, "none": torch.zeros(0, dtype=dtype)}))))


def test_finite_parts_whose_sum_is_not_are_found() -> None:
    """A grid whose top level overflows; a value alone and in its kernel."""
    huge = 3e38
    coarse = Quantised({"w": torch.tensor([0, 255], dtype=torch.uint8)}, {"w": torch.tensor([huge, huge])})
    assert coarse.dense()["w"].isinf().any()
    kernel = {"c": torch.full((1, 1, 2, 2), huge)}
    none = {"c": torch.zeros(0, dtype=torch.int64)}
    both = Packages(
        TopK.of(kernel, {"c": torch.tensor([1])}), TopK.of(kernel, {"c": torch.tensor([0])}, depth=2),
        TopK.of({"c": torch.ones(1, 1)}, none), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.uint8),
    )  # fmt: skip
    assert both.dense()["c"].isinf().any()
    for value in (Rounded(coarse), Parcel(both)):
        with pytest.raises(FrameError, match="not all finite"):
            check_finite(leaves_of(value))


def test_the_bombs_would_go_off() -> None:
    """They are what they seem: one block of them is a good section, and zstandard itself inflates them."""
    case = bombs()["zstd, honest"][0]
    assert case.layout is not None
    frame = assemble("Whole", [[True, [[1, [1]]]]], [zstd_of_zeros(1, 131_072)], layout=case.layout.hash)
    assert not unpack(Whole, frame, layout=case.layout).model.state["w"].any()
    section = zstd_of_zeros(80, 80 * 131_072)
    assert len(zstandard.ZstdDecompressor().decompress(section)) == 80 * 131_072
    frame = assemble("Whole", [[[["f", "uint8", [80 * 131_072]]], [[1, [1]]]]], [section])
    assert unpack(Whole, frame).model.state["f"].shape == (80 * 131_072,)
    assert Case(Whole, b"").refuse(frame, limit=80 * 131_072 - 1) == "length"
    assert len(zstd_of_zeros(8192, GiB)) < 33_000


def measure_bombs() -> list[dict[str, Any]]:
    """Unpack every bomb with 8 MiB of memory to spare; what each takes."""
    import resource

    waiting = bombs()
    cases()["dense"].unpack()
    found = []

    def limit_to(spare: int) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare, resource.RLIM_INFINITY))

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def one(name: str, case: Case, data: bytes, limit: int) -> None:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
        before, seconds = peak(), []
        for _ in range(3):
            start = time.process_time()
            code = case.refuse(data, limit=limit)
            seconds.append(time.process_time() - start)
        grown = peak() - before
        found.append({"name": name, "bytes": len(data), "code": code, "ms": 1000 * min(seconds), "grown_kB": grown})

    limit_to(8 * MiB)
    for name, (case, data, limit) in waiting.items():
        one(name, case, data, limit)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="limits its address space as Linux does")
def test_bombs_take_no_memory() -> None:
    there = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, __file__], env=there, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(found) == len(bombs())
    assert sum(row["grown_kB"] for row in found) < 4096


# ---------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_a_receiver_holds_no_more_than_its_limit(coded: bool, named: bool) -> None:
    state = {"w": torch.zeros(1000), "n": torch.ones(10, dtype=torch.int64)}
    layout = None if named else Layout.of(state)
    frame = bytes(pack(Whole(Dense(state)), layout=layout, coded=coded))
    case = Case(Whole, frame, layout)
    assert same(case.unpack(limit=4080).model, Dense(state))
    for limit in (0, 1, 4000, 4079):
        assert case.refuse(frame, limit=limit) == "length"


@pytest.mark.parametrize("coded", [True, False])
def test_limits_count_masks_values_and_bytes(coded: bool) -> None:
    value = Masked.of({"w": torch.ones(1000)}, {"w": torch.arange(1000) % 4 == 0})
    frame = bytes(pack(Part(value), coded=coded))
    assert same(unpack(Part, frame, limit=6000).model, value)  # with 4000 once it is dense
    assert Case(Part, frame).refuse(frame, limit=5999) == "length"
    note = bytes(pack(Note(b"x" * 1000), coded=coded))
    assert unpack(Note, note, limit=1000).raw == b"x" * 1000
    assert Case(Note, note).refuse(note, limit=999) == "length"
    both = dataclasses.replace(EXAMPLE, raw=b"x" * 600, dense=Dense({"a": torch.zeros(100)}), by_client={})
    tensors = [*both.state.values(), both.tensor, both.perhaps, *both.dense.state.values(), both.masked.values]
    total = sum(t.nbytes for t in tensors if t is not None) + 15 + 600 + 1 + 1  # a mask and its dense values; bytes
    frame = bytes(pack(both, coded=coded))
    assert same(unpack(Everything, frame, limit=total), both)
    assert Case(Everything, frame).refuse(frame, limit=total - 1) == "length"


def test_decoding_takes_little_more_than_the_limit() -> None:
    """Small frames of arrays exactly as large as the limit, and what is allocated on the way."""
    n = 64 * 131_072
    ones = zstd_of_zeros(8, n // 8)

    def peak(cls: type[Any], frame: bytes, limit: int, base: Base | None = None) -> float:
        tracemalloc.start()
        unpack(cls, frame, limit=limit, base=base)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert Case(cls, b"", None, base).refuse(frame, limit=limit - 1) == "length"
        return most / limit

    planes = [zstd_of_zeros(128, 2 * n), zstd_of_zeros(64, n), zstd_of_zeros(64, n)]
    assert peak(Whole, assemble("Whole", [[[["f", "float32", [n]]], [[1, [1] * 3]]]], planes), 4 * n) < 3.1
    base = Base(blake3(b"message").digest(), {"g": torch.zeros(1)})
    entries, delta = [["f", "float32", [n - 1]], ["g", "float32", [1]]], [[2, [1] * 4]]
    frame = assemble("Whole", [[entries, delta]], [zstd_of_zeros(64, n)] * 4, base=base.digest[:16], major=2)
    assert peak(Whole, frame, 4 * n, base) < 3.1
    for kind, rare in ((1, n // 8), (2, 7 * n // 8)):
        values = zstd_of_zeros(rare // 131_072, rare)
        frame = assemble("Part", [[[["f", "uint8", [n]]], [kind, 1, n // 8, rare], [1, [1]]]], [ones, values])
        assert peak(Part, frame, 2 * n + rare) < 3.1


def test_frames_are_also_files() -> None:
    """A client's state as it is stored: no layout, nothing coded, parts written one after another."""
    frame: Frame = pack(EXAMPLE, coded=False)
    stored = b"".join(bytes(part) for part in frame.parts)
    assert stored == bytes(frame)
    assert same(unpack(Everything, stored, limit=1 << 40), EXAMPLE)
    Case(Everything, stored).refuse(stored[:-1], limit=1 << 40)


if __name__ == "__main__":
    for row in measure_bombs():
        print(json.dumps(row))


@payload
class Many:
    names: list[int]


def test_what_stays_where_it_is_made_may_have_a_header_of_any_size():
    many = Many([1 << 40] * 200_000)
    with pytest.raises(ValueError, match="too many entries"):
        pack(many)
    stays = bytes(pack_state(many))
    assert unpack_state(Many, stays).names == many.names
    with pytest.raises(FrameError):  # nobody else reads it
        unpack(Many, stays)
    with pytest.raises(FrameError):
        unpack_state(Many, stays[:-1])
