"""Tables of numbers: what is written is read again, wherever they lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fewbytes as fb
from fewbytes.core import table
from fewbytes.core.table import Stack, Table

SHAPES = st.dictionaries(st.text(max_size=3), st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1)


@given(SHAPES, st.integers(0, 6), st.sampled_from([1, 256 << 20]))
def test_states_are_stacked_and_read_again(shapes, rows, in_memory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "IN_MEMORY", in_memory)
        generator = torch.Generator().manual_seed(rows)
        states = [
            {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(rows)
        ]
        stack = Stack(states)
    assert len(stack) == rows
    for row, state in enumerate(states):
        assert stack[row].keys() == state.keys()
        assert all(torch.equal(stack[row][name], value) for name, value in state.items())
        assert torch.equal(
            stack.flat(state), torch.cat([torch.empty(0), *(stack.flat(part[row]) for part in parts(stack))])
        )
    with pytest.raises(IndexError):
        stack[rows]


def parts(stack: Stack) -> list[list[dict[str, torch.Tensor]]]:
    return [stack.part(start, stop) for start, stop in stack.blocks()]


def test_parts_are_of_one_entry_each_and_all_of_it(monkeypatch):
    monkeypatch.setattr(table, "BLOCK", 2048)
    stack = Stack([{"a": torch.zeros(3000), "b": torch.zeros(2, 5), "none": torch.zeros(0)}] * 2)
    assert stack.blocks() == [(0, 1024), (1024, 2048), (2048, 3000), (3000, 3010)]
    assert [list(part[0]) for part in parts(stack)] == [["a"], ["a"], ["a"], ["b"]]


def test_what_does_not_stack_is_told():
    stack = Stack([{"a": torch.zeros(2)}])
    for other in ({"b": torch.zeros(2)}, {"a": torch.zeros(3)}, {"a": torch.zeros(2).double()}, {}):
        with pytest.raises(fb.MethodError, match="do not stack"):
            stack.add(other)
    assert len(stack) == 1


def test_rows_are_written_in_any_order_and_part_by_part():
    made = Table(5)
    made.write(2, torch.arange(3.0), start=1)
    made.write(0, torch.ones(5))
    assert made.read(0).tolist() == [1.0] * 5
    assert made.read(2, 0, 4).tolist() == [0.0, 0.0, 1.0, 2.0]
