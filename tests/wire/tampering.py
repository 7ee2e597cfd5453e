"""Frames that lie: honest ones whose header and sections are changed as any bytes say, with all checksums true.

It is what fuzzers need: the same bytes make the same frame, near bytes near frames.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zstandard
from assembling import assemble, take_apart
from crc32c import crc32c
from test_wire import WRONG, Case, cases, changed, double, drop, nest, node, paths, put, swap

from fewbytes.wire import FrameError
from fewbytes.wire.fields import check_finite
from fewbytes.wire.schema import leaves_of

LIMIT = 1 << 20
"""Bytes of arrays that the receiver of such frames is ready to hold."""


class Choices:
    """Numbers chosen by bytes; zeros once none are left."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def below(self, n: int) -> int:
        """A number from 0 to n - 1."""
        return int.from_bytes(self.take(2), "little") % n

    def take(self, length: int) -> bytes:
        """The next bytes."""
        self._at += length
        return self._data[self._at - length : self._at]


def tampered(name: str, data: bytes) -> tuple[Case, bytes]:
    """The case of that name, and its frame changed as `data` say."""
    case, choices = cases()[name], Choices(data)
    kind, fields, sections, hashes = take_apart(case.frame)
    tree: Any = [kind, fields]
    lies_about_sections = choices.below(8) == 1
    while choices:
        if sections and choices.below(3) == 0:
            k = choices.below(len(sections))
            sections[k] = _other_section(sections[k], sections, choices)
        else:
            tree = _other_tree(tree, choices)
    table: Any = [[len(s), crc32c(s)] for s in sections] if hashes["major"] < 3 else [len(s) for s in sections]
    whole = [*tree, table] if isinstance(tree, list) else tree
    if lies_about_sections:
        whole = _other_tree(whole, Choices(data[2:12]))
    return case, assemble(None, None, sections, header=msgspec.msgpack.encode(whole), **hashes)


def _other_section(section: bytes, sections: list[bytes], choices: Choices) -> bytes:
    at = choices.below(len(section) + 1)
    match choices.below(6):
        case 0:
            return section[:at]
        case 1:
            return section[:at] + choices.take(choices.below(64)) + section[at:]
        case 2:
            new = choices.take(choices.below(64))
            return section[:at] + new + section[at + len(new) :]
        case 3:
            return sections[choices.below(len(sections))]
        case 4:
            return zstandard.compress(choices.take(choices.below(64)) * choices.below(4096))
        case _:
            return (
                section[:at] + bytes(byte ^ 1 << choices.below(8) for byte in section[at : at + 1]) + section[at + 1 :]
            )


def _other_tree(tree: Any, choices: Choices) -> Any:
    there = list(paths(tree))
    path = there[choices.below(len(there))]
    here = node(tree, path)
    match choices.below(8):
        case 0:
            change = put(WRONG[choices.below(len(WRONG))])
        case 1:
            change = put(node(tree, there[choices.below(len(there))]))
        case 2:
            change = (drop, double, nest, swap)[choices.below(4)] if path else nest
        case 3:
            change = put(choices.take(choices.below(64)))
        case _ if type(here) is int:
            change = put((here + choices.below(65_536) - 32_768) % (1 << 63))
        case _:
            change = put(int.from_bytes(choices.take(choices.below(9)), "little"))
    return changed(tree, path, change)


def accepted(case: Case, frame: bytes) -> bool:
    """Whether the frame was accepted, and its numbers are finite; fails for any end but that and a FrameError.

    What is accepted is of the class, can travel again, and is as finite as what becomes of it.
    """
    if not case.accept_or_refuse(frame, limit=LIMIT):
        return False
    value = case.unpack(frame, limit=LIMIT)
    try:
        check_finite(leaves_of(value))
    except FrameError:
        return False
    for field in vars(value).values():
        for tensor in field.states().values() if hasattr(field, "states") else ():
            assert not tensor.is_floating_point() or bool(tensor.isfinite().all())
    return True
