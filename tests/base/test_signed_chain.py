"""A signed chain: whatever is changed, removed, swapped or added is found, and its line is named."""

from __future__ import annotations

import random

import pytest

from fewbytes.base.chain import Chain, Fault, fingerprints, make_key, verify
from fewbytes.base.errors import UserError

LINES = 6


@pytest.fixture
def folder(tmp_path):
    chain = Chain(tmp_path / "site", make_key(tmp_path / "key"))
    for i in range(LINES):
        assert chain.news() == []
        chain.append({"run": f"run-{i}", "bytes": 100 * i})
    return tmp_path / "site"


def fault_of(folder):
    found, fault = verify(folder)
    assert fault is None or len(found) <= LINES
    return fault


def opened(folder):
    """What a node does at its start."""
    return Chain(folder, folder.parent / "key").news()


def test_a_whole_chain_is_read_again_and_verified(folder):
    found, fault = verify(folder)
    assert fault is None
    assert [line["bytes"] for line in found] == [100 * i for i in range(LINES)]
    assert opened(folder) == found
    assert fingerprints(folder / "key.pub")[0].startswith("SHA256:")


def test_a_second_process_continues_the_chain_and_the_first_reads_on(folder):
    first, second = (Chain(folder, folder.parent / "key") for _ in range(2))
    assert len(first.news()) == len(second.news()) == LINES
    first.append({"by": 1})
    assert [line["by"] for line in second.news()] == [1]
    second.append({"by": 2})
    assert [line["by"] for line in first.news()] == [2]
    assert fault_of(folder) is None


def test_every_byte_counts(folder):
    """Each of them replaced by another one, in turn."""
    path, draw = folder / "egress.jsonl", random.Random(0)
    data = path.read_bytes()
    for i, byte in enumerate(data):
        changed = draw.choice([other for other in range(256) if other != byte])
        path.write_bytes(data[:i] + bytes([changed]) + data[i + 1 :])
        fault = fault_of(folder)
        assert fault is not None, i
        assert fault.line == min(LINES, 1 + data[:i].count(b"\n")), i
    path.write_bytes(data)
    assert fault_of(folder) is None


@pytest.mark.parametrize("line", range(1, LINES + 1))
def test_a_line_that_is_removed_or_repeated_is_named(folder, line):
    path = folder / "egress.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: line - 1] + lines[line:]))
    assert fault_of(folder).line == line
    with pytest.raises(UserError, match=rf"damaged \(line {line}: "):
        opened(folder)
    path.write_bytes(b"".join(lines[:line] + lines[line - 1 :]))
    assert fault_of(folder).line == line + 1


@pytest.mark.parametrize("line", range(1, LINES))
def test_lines_that_are_swapped_are_named(folder, line):
    path = folder / "egress.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1], lines[line] = lines[line], lines[line - 1]
    path.write_bytes(b"".join(lines))
    assert fault_of(folder).line == line


def test_a_chain_by_another_key_is_not_this_nodes(folder, tmp_path):
    other = tmp_path / "other"
    Chain(other, make_key(tmp_path / "another")).append({"run": "forged"})
    assert verify(folder, other / "key.pub")[1] == Fault(1, "its signature is not by this node's key")
    assert verify(folder, folder / "key.pub")[1] is None


def test_a_replaced_key_signs_on_and_older_lines_remain_valid(folder, tmp_path):
    chain = Chain(folder, make_key(tmp_path / "new"))
    chain.news()
    chain.append({"run": "after"})
    found, fault = verify(folder)
    assert fault is None
    assert len(found) == LINES + 1
    assert len(fingerprints(folder / "key.pub")) == 2


def test_a_line_torn_by_a_loss_of_power_is_dropped_and_a_head_one_line_behind_is_taken(folder):
    path, head = folder / "egress.jsonl", folder / "egress.head"
    before = head.read_bytes()
    chain = Chain(folder, folder.parent / "key")
    chain.news()
    chain.append({"run": "last"})
    head.write_bytes(before)
    assert len(opened(folder)) == LINES + 1
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"line":8,"run":"to')
    assert len(opened(folder)) == LINES + 1
    assert path.read_bytes() == whole


def test_a_key_that_is_none_is_refused_in_a_line(tmp_path):
    (tmp_path / "key").write_text("no key")
    with pytest.raises(UserError, match="not a node's private key"):
        Chain(tmp_path / "site", tmp_path / "key")
    with pytest.raises(UserError, match="cannot be read"):
        Chain(tmp_path / "site", tmp_path / "missing")
    with pytest.raises(UserError, match="cannot be read"):
        verify(tmp_path / "nothing")
