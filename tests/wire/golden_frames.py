"""The values in the frames kept in git (`test_frames.py`), and how each is packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from payloads import Album, Choice, Directions, Few, Parcel, Rounded
from torch import Tensor

from fewbytes.base.rate import Rate
from fewbytes.base.state import State
from fewbytes.wire import (
    Base,
    Bits,
    Dense,
    Frame,
    Images,
    Layout,
    Lossy,
    Masked,
    Packages,
    Quantised,
    Signs,
    TopK,
    base_of,
    pack,
    payload,
)
from fewbytes.wire.frame import FORMAT, digest_of
from fewbytes.wire.layout import DTYPES

FOLDER = Path(__file__).parents[1] / "frames"


def tensor(words: np.ndarray[Any, Any], dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor of these bits."""
    words = np.ascontiguousarray(words).view(np.uint8)
    if dtype == torch.bool:
        return torch.from_numpy(words & 1).to(torch.bool).reshape(shape)
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.from_numpy(words.view(f"i{dtype.itemsize}").copy()).to(signed).view(dtype).reshape(shape)


@payload
class Model:
    model: Dense


@payload
class Update:
    round: int
    change: Masked


@dataclass(frozen=True, eq=False)
class Shard:
    name: str
    weight: float


@payload
class Fields:
    nothing: None
    flag: bool
    lowest: int
    highest: int
    reals: list[float]
    text: str
    raw: bytes
    some: int | None
    none: int | None
    pair: tuple[int, str]
    many: tuple[bool, ...]
    table: dict[int, list[bytes]]
    shards: list[Shard]
    state: State
    scalar: Tensor
    empty: Tensor | None
    dense: Dense
    masked: Masked
    by_client: dict[int, Dense]


@dataclass(frozen=True)
class Example:
    """A value and how it is packed."""

    value: Any
    layout: Layout | None = None
    base: Base | None = None
    coded: bool = False
    rate: Rate | None = None  # of what is rounded, which is all but an entry "exact"

    def pack(self) -> Frame:
        lossy = None if self.rate is None else Lossy(self.rate, exact={"exact"})
        return pack(self.value, layout=self.layout, base=self.base, coded=self.coded, lossy=lossy)


def numbers(dtype: torch.dtype, n: int, shift: int = 0) -> Tensor:
    """Some numbers of a type: rising slowly, both signs where it has them; exact in every type."""
    rising = torch.arange(n) // 4 - 20 + shift
    if dtype == torch.bool:
        return rising.remainder(2).bool()
    return (rising / 8).to(dtype) if dtype.is_floating_point else rising.clamp(min=torch.iinfo(dtype).min).to(dtype)


def scattered(n: int, every: int) -> Tensor:
    """A mask of about one in `every` places, with long gaps and short."""
    return (torch.arange(n) * torch.arange(n) + 3 * (torch.arange(n) // 7)) % every == 0


def whole_steps() -> Tensor:
    """2000 numbers whose mean square is 1, in sixteenths: steps of that much lose nothing of them."""
    least = [17, 15] * 128 + [16] * 743 + [32] * 250
    mixed = torch.tensor(least + [0] * (2000 - len(least)))[torch.arange(2000) * 7919 % 2000]
    return mixed * (1 - 2 * (torch.arange(2000) ** 2 // 3 % 2)) / 16


def examples() -> dict[str, Example]:
    """Values by the name of their file. Literal, or computed exactly: no generator's stream may change them."""
    model = {name: numbers(dtype, 240).reshape(2, 10, 12) for name, dtype in DTYPES.items()}
    layout = Layout.of(model)
    moved = {name: numbers(dtype, 240, 1).reshape(2, 10, 12) for name, dtype in DTYPES.items()}
    part = {name: model[name] for name in ("bool", "float32", "int64")}
    bits = np.array([0x7F800001, 0xFFC12345, 0x80000000, 0x7F800000, 0xFF800000, 1, 0x80000001], np.uint32)
    odd = {"odd": tensor(bits, torch.float32, (7,)), "none": torch.zeros(0, 3), "": torch.tensor(7, dtype=torch.int16)}
    foreign = {"new": torch.arange(3.0), "float32": numbers(torch.float32, 8)}
    message = Example(Model(Dense(model)), layout)
    base = base_of(message.pack().digest, message.value)

    weights = {"w": numbers(torch.float32, 2000).reshape(40, 50)}
    wide = Layout.of(weights)
    noise = (torch.arange(2000) ** 3 * 40503 // 4096 % 256 - 128).to(torch.int32).reshape(40, 50)
    near = {"w": (weights["w"].view(torch.int32) + noise).view(torch.float32)}
    far = {"w": torch.where(torch.arange(2000).reshape(40, 50) % 7 < 3, weights["w"], weights["w"] * 1.375)}
    # The digest is spelled out: that of a coded frame may change with zstandard.
    held = Base(bytes(range(32)), {"w": weights["w"] - 0.125})

    kernels = {"k": weights["w"].view(10, 20, 2, 5)}
    parcel = Packages(
        TopK.of(kernels, {"k": torch.arange(30) ** 2}),
        TopK.of(kernels, {"k": torch.tensor([100, 130, 199])}, depth=2),
        TopK.of({"k": weights["w"][:, :5].reshape(10, 20)}, {"k": torch.tensor([101, 120])}),
        torch.tensor([0b1111100000, 0]),
        torch.tensor([1, 0], dtype=torch.uint8),
    )
    random = torch.arange(2000) ** 3 * 40503 // 4096 % 256 < 9
    signs = {"w": ((torch.arange(2000) ** 2 // 3 % 7 - 3).sign()).to(torch.int8).reshape(40, 50)}

    steps, at = whole_steps(), torch.arange(1024)
    few_ones = ((at % 4 == 0) * (1 - 2 * (at // 4 % 3 // 2))).float()  # whose root mean square is 0.5
    moves = {"w": steps.view(20, 10, 2, 5), "exact": numbers(torch.float32, 9), "n": torch.tensor(7)}
    apart = {"w": torch.stack([steps, steps + 1], 1).view(40, 50, 2)}

    def rounded(value: Any, step: float, **options: Any) -> Example:
        return Example(value, **{"coded": True, "rate": Rate(step=step), **options})

    at = torch.arange(16)
    colours = torch.stack([at * at, 3 * at, 90 - at])[:, :, None] + at * torch.tensor([1, 5, 2])[:, None, None]
    album = Album(Images((colours + 40 * torch.arange(5)[:, None, None, None]).to(torch.uint8)))

    def masked(mask: Tensor, **options: Any) -> Example:
        value = Update(3, Masked.of(weights, {"w": mask.reshape(40, 50)}))
        return Example(value, **{"layout": wide, "coded": True, **options})

    def few(mask: Tensor, **options: Any) -> Example:
        return Example(Few(TopK.of(weights, {"w": torch.nonzero(mask).flatten()})), **{"layout": wide, **options})

    return {
        "model": message,
        "model-part": Example(Model(Dense(part)), layout),
        "model-foreign": Example(Model(Dense(foreign)), layout),
        "model-named": Example(Model(Dense(odd))),
        "model-empty": Example(Model(Dense({}))),
        "model-coded": Example(message.value, layout, coded=True),
        "model-coded-named": Example(message.value, coded=True),
        "model-reply": Example(Model(Dense(moved)), layout, base, coded=True),
        "weights-moved": Example(Model(Dense(far)), wide, Base(bytes(range(32)), weights), coded=True),
        "weights-coded": Example(Model(Dense(weights)), wide, coded=True),
        "weights-reply": Example(Model(Dense(near)), wide, Base(bytes(range(32)), weights), coded=True),
        "update": masked(scattered(2000, 3), coded=False),
        "update-named": masked(scattered(2000, 3), coded=False, layout=None),
        "update-sparse": masked(scattered(2000, 37)),
        "update-sparser": masked((torch.arange(2000) % 997) == 3),
        "update-dense": masked(~scattered(2000, 37)),
        "update-denser": masked((torch.arange(2000) % 997) != 3),
        "update-even": masked(torch.arange(2000) % 16 < 5),
        "update-half": masked(scattered(2000, 3)),
        "update-reply": masked(scattered(2000, 3), base=held),
        "update-none": masked(torch.zeros(2000, dtype=torch.bool)),
        "bits": Example(Choice(Bits({"w": scattered(2000, 3).reshape(40, 50)})), wide),
        "bits-sparse": Example(Choice(Bits({"w": scattered(2000, 37).reshape(40, 50)})), wide, coded=True),
        "bits-named": Example(Choice(Bits({"a": scattered(9, 3), "none": torch.ones(0, 2, dtype=torch.bool)}))),
        "quantised-8": Example(Rounded(Quantised.of(weights, 8)), wide),
        "quantised-16": Example(Rounded(Quantised.of(weights, 16)), wide),
        "quantised-coded": Example(Rounded(Quantised.of(weights, 16)), wide, coded=True),
        "quantised-named": Example(Rounded(Quantised.of({"a": weights["w"][:2], "none": torch.zeros(0, 2)}, 8))),
        "images": Example(album),
        "images-coded": Example(album, coded=True),
        "images-grey": Example(Album(Images(album.images.pixels[:, :1].clone())), coded=True),
        "images-none": Example(Album(Images(album.images.pixels[:0])), coded=True),
        "few": few(random),
        "few-coded": few(random, coded=True),
        "few-most": few(~random, coded=True, layout=None),
        "few-even": few(torch.arange(2000) % 16 < 5, coded=True),
        "few-kernels": Example(Few(TopK.of({"k": weights["w"].view(10, 10, 20)}, {"k": torch.arange(7) ** 2 * 2}, 2))),
        "packages": Example(Parcel(parcel), Layout.of(kernels)),
        "packages-named": Example(Parcel(parcel), coded=True),
        "signs": Example(Directions(Signs(signs, torch.tensor([0.375]))), wide),
        "signs-named": Example(Directions(Signs({"a": signs["w"][:3], "none": signs["w"][:0]}, torch.tensor([2.0])))),
        "rounded-fine": rounded(Model(Dense(moves)), 1 / 16, layout=Layout.of(moves)),
        "rounded-named": rounded(Model(Dense({"w": few_ones, "": steps[:0]})), 2.0),
        "rounded-reply": rounded(
            Model(Dense({"w": weights["w"] + steps.view(40, 50)})),
            1 / 16,
            layout=wide,
            base=Base(bytes(range(32)), weights),
        ),
        "rounded-update": rounded(
            Update(3, Masked.of(apart, {"w": torch.arange(4000).view(40, 50, 2) % 2 == 0})), 1 / 16
        ),
        "fields": Example(
            Fields(
                nothing=None,
                flag=True,
                lowest=-(1 << 63),
                highest=(1 << 63) - 1,
                reals=[0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324],
                text="Grüße, 世界",
                raw=bytes(range(11)),
                some=1,
                none=None,
                pair=(300, "pair"),
                many=(True, False, True),
                table={1: [b"one", b""], -70000: []},
                shards=[Shard("a", 0.5), Shard("b", 1.5)],
                state=part,
                scalar=torch.tensor(-1.5, dtype=torch.float64),
                empty=torch.zeros(0, dtype=torch.int8),
                dense=Dense(odd),
                masked=Masked.nonzero({"m": torch.tensor([[0.0, 1.0], [2.0, 0.0]])}),
                by_client={4: Dense(foreign), 9: Dense({})},
            ),
            layout,
        ),
    }


def stored(name: str, version: int = FORMAT) -> bytes:
    return (FOLDER / str(version) / f"{name}.frame").read_bytes()


def held_by(name: str, version: int) -> Base | None:
    """The base of a stored frame's receiver."""
    base = examples()[name].base
    if name == "model-reply" and base is not None:  # which answers the message in the file beside it
        return Base(digest_of(stored("model", version)), base.tensors)
    return base
