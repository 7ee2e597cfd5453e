"""What a payload's class says of its fields is read once, and found again at each value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import torch
from msgspec import Meta
from torch import Tensor

from fewbytes.base.errors import FrameError
from fewbytes.base.ranges import EXACT, OF_TRAINING, PART, SENT
from fewbytes.base.state import State
from fewbytes.core.admission import Expected, admit, finite_norm
from fewbytes.wire import Bits, Dense, Layout, counted, payload
from fewbytes.wire.schema import leaves_of, schema_of


@dataclass
class Block:
    theta: Annotated[Dense, PART]
    share: Annotated[float, Meta(ge=0, le=1)]


@payload
class Everywhere:
    blocks: Annotated[list[dict[int, Block | None]], EXACT]
    pair: tuple[Tensor, Dense]
    state: State
    rates: list[Annotated[float, Meta(gt=0)]]
    samples: Annotated[int, OF_TRAINING]
    mask: Annotated[Bits | None, SENT]


def example(share: float = 0.5, rates: tuple[float, ...] = (1.0,), name: str = "w") -> Everywhere:
    block = Block(Dense({name: torch.full((2,), 3.0)}), share)
    pair = torch.full((1,), 4.0), Dense({"w": torch.zeros(2)})
    return Everywhere([{7: block, 8: None}], pair, {"s": torch.ones(3)}, list(rates), 5, None)


def test_leaves_say_where_they_stand_and_how_they_are_marked() -> None:
    leaves = [leaf for leaf in leaves_of(example()) if leaf.value not in (7, 8)]  # but keys
    assert [(leaf.path, set(leaf.marks)) for leaf in leaves] == [
        ("blocks[0][7].theta", {EXACT, PART}),
        ("blocks[0][7].share", {EXACT}),
        ("blocks[0][8]", {EXACT}),
        ("pair[0]", set()),
        ("pair[1]", set()),
        ("state", set()),
        ("rates", set()),
        ("samples", {OF_TRAINING}),
        ("mask", {SENT}),
    ]
    names = [leaf.name(entry) for leaf in leaves for entry in leaf.tensors]
    assert names == ["blocks[0][7].theta[w]", "pair[0]", "pair[1][w]", "state[s]"]
    assert [number for leaf in leaves for number in leaf.floats] == [0.5, 1.0]
    assert finite_norm(leaves, "") == pytest.approx((2 * 9 + 16 + 3 + 0.25 + 1) ** 0.5)


def test_a_schema_is_compiled_once_and_a_class_without_values_has_one() -> None:
    assert schema_of(Everywhere) is schema_of(Everywhere)
    assert {(of, frozenset(marks)) for of, marks in schema_of(Everywhere).types() if of in (Dense, Bits)} == {
        (Dense, frozenset({EXACT, PART})),
        (Dense, frozenset()),
        (Bits, frozenset({SENT})),
    }


def test_nothing_and_a_bare_value_have_leaves() -> None:
    assert leaves_of(None) == []
    (leaf,) = leaves_of(Dense({"w": torch.ones(4)}))
    assert (leaf.path, set(leaf.tensors)) == ("", {"w"})
    assert counted(None).nominal_bytes == 0
    assert counted(example()).value_bytes == 16


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"share": 1.5}, r"blocks\[0\]\[7\]\.share must be in \[0, 1\]"),
        ({"rates": (1.0, -1.0)}, "rates must be above 0"),
        ({"name": "other"}, "an unexpected entry 'other'"),
        ({"share": float("nan")}, r"'blocks\[0\]\[7\]\.share' are not all finite"),
    ],
)
def test_what_stands_within_a_list_is_admitted_as_what_stands_alone(wrong, says) -> None:
    known = Expected(Layout.of({"w": torch.zeros(2)}), frozenset(), None, {}, 5, None, 1, 1e9)

    def taken(value: Everywhere) -> None:
        leaves = leaves_of(value)
        admit(leaves, finite_norm(leaves, "?"), known)

    taken(example())
    with pytest.raises(FrameError, match=says):
        taken(example(**wrong))
