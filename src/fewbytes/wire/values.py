"""Writer and reader of payloads: sections of a frame, coded against the message that a reply answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from fewbytes.base.errors import FrameError
from fewbytes.base.ranges import EXACT, FRESH
from fewbytes.base.state import State
from fewbytes.wire import coding, run_lengths, words
from fewbytes.wire.frame import Parsed
from fewbytes.wire.grid import GRID_TYPES
from fewbytes.wire.layout import DTYPES, Entry, Layout, Place, entry_of
from fewbytes.wire.lossy import Lossy, round_finely, round_on_grid, round_values, rounded_values
from fewbytes.wire.sections import Array, Buffer
from fewbytes.wire.words import CHANGES, ON_GRID, ROUNDED, ROUNDED_BEFORE


@dataclasses.dataclass(frozen=True)
class Base:
    """The message that a reply answers, known to both ends: its frame's digest and its tensors by name. `values`: the
    tensors of each of its wire values, in order, for the next message of its class."""

    digest: bytes
    tensors: Mapping[str, Tensor]
    values: Sequence[State] = ()
    _words: dict[str, Array] = dataclasses.field(default_factory=dict, repr=False)
    _versions: dict[str, int] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._versions.update({name: tensor._version for name, tensor in self.tensors.items()})

    def changed(self) -> list[str]:
        """Names of tensors that were changed in place after the message was sent: nothing can be coded against them."""
        return [name for name, tensor in self.tensors.items() if tensor._version != self._versions[name]]

    def tensor(self, entry: Entry) -> Tensor | None:
        """The tensor with the entry's name; None if its type or shape differs, or it is missing."""
        tensor = self.tensors.get(entry.name)
        return tensor if entry.describes(tensor) else None

    def tensor_at(self, position: int, entry: Entry) -> Tensor | None:
        """The tensor with the entry's name in the wire value at a position; None as for `tensor`."""
        tensor = self.values[position].get(entry.name) if position < len(self.values) else None
        return tensor if entry.describes(tensor) else None

    def words(self, entry: Entry) -> Array | None:
        """The tensor's bits, flat."""
        tensor = self.tensor(entry)
        if tensor is None:
            return None
        if entry.name not in self._words:
            self._words[entry.name] = flat_words(tensor)
        return self._words[entry.name]

    @classmethod
    def together(cls, bases: Sequence[Base]) -> Base | None:
        """Several messages that arrived together as one base, of equal names the last tensor; None for no message."""
        if len(bases) < 2:
            return bases[0] if bases else None
        merged = {name: tensor for base in bases for name, tensor in base.tensors.items()}
        return cls(blake3(b"".join(base.digest for base in bases)).digest(), merged)


def flat_words(value: Tensor) -> Array:
    """A tensor's bits in C order as a flat array of unsigned integers (no copy where it is contiguous)."""
    value = value.detach().cpu().contiguous().reshape(-1)
    width = value.dtype.itemsize
    if value.dtype == torch.bool:
        return value.numpy().view(np.uint8)
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    return value.view(signed).numpy().view(f"u{width}")


def tensor_of(words: Array, dtype: torch.dtype) -> Tensor:
    """Undo `flat_words`: a flat tensor of `dtype` over the same memory."""
    if dtype == torch.bool:
        if words.max(initial=0) > 1:
            raise FrameError("coding", "a truth value is neither 0 nor 1")
        return torch.from_numpy(words).to(torch.bool)
    return torch.from_numpy(words.view(f"i{words.dtype.itemsize}")).view(dtype)


class FrameWriter:
    """Collects a payload's sections; wire values call its methods."""

    def __init__(self, layout: Layout | None, base: Base | None, coded: bool, lossy: Lossy | None = None) -> None:
        self.layout, self.base, self.coded, self.lossy = layout, base, coded, lossy
        self.path, self.marks, self.position = "", frozenset[str](), -1
        """The current value's path, the marks of its field, and its position among the payload's wire values."""
        self.sections: list[list[Buffer]] = []

    def section(self, parts: list[Buffer]) -> None:
        """Add a section: its parts, one after another."""
        self.sections.append(parts)

    def entries(self, state: Mapping[str, Tensor]) -> tuple[Any, list[Entry]]:
        """The header's item for the entries that travel, and these in order.

        True: all of the layout; bytes: a bitset over the layout; else a list of (name, type, shape).
        """
        known = self.layout
        if known is None or not all(known.has(name, value) for name, value in state.items()):
            entries = [entry_of(name, value) for name, value in state.items()]
            return [[e.name, e.dtype, list(e.shape)] for e in entries], entries
        chosen = np.zeros(len(known.entries), bool)
        chosen[[known.index[name] for name in state]] = True
        entries = [entry for entry, here in zip(known.entries, chosen.tolist(), strict=True) if here]
        return (True if chosen.all() else np.packbits(chosen, bitorder="little").tobytes()), entries

    def numbers(self, tensors: Sequence[Tensor], bases: Sequence[Array | None]) -> Any:
        """Write tensors of one type as one value; `bases`: arrays from `Base.words`, None for no base."""
        floating = tensors[0].is_floating_point() if tensors else True
        arrays = [flat_words(t) for t in tensors]
        known = _filled(bases, [a.size for a in arrays], arrays[0].dtype.itemsize) if arrays and self.coded else None
        return coding.encode_numbers(self, arrays, known, floating, self.coded)

    def bits(self, mask: Array) -> Any:
        """Write a flat bool array."""
        return run_lengths.encode_bits(self, mask, self.coded)

    def places(self, places: Array, size: int) -> Any:
        """Write distinct places below `size`, int64 and ascending."""
        return run_lengths.encode_places(self, places, size, self.coded)

    def values(self, tensors: Sequence[Tensor], places: Sequence[Place], lossy: bool = True) -> Any:
        """Write values of one type at these places; if `lossy`, a run may have them rounded."""
        base = self.base if self.coded else None
        rounded = None
        if lossy and self.lossy is not None and EXACT in self.marks:
            self.lossy.left += sum(value.numel() for value in tensors)
        elif lossy and self.lossy is not None:
            if self.lossy.grid is not None and tensors[0].dtype in GRID_TYPES and FRESH not in self.marks:
                before = [_at_position(base, self.position, place) for place in places]
                rounded = round_on_grid(self, tensors, places, before, self.lossy, self.path)
            else:
                known = [_base_values(base, place) for place in places]
                rounded = round_values(self, tensors, places, known, self.lossy, self.path, self._lasting)
        header = None
        left, exact = _unrounded(places, tensors, rounded)
        if lossy and self.lossy is not None and EXACT not in self.marks and left:
            known = [_base_values(base, place) for place in left]
            fine = round_finely(self, exact, left, known, self.lossy, self.path)
            left, exact = _unrounded(left, exact, fine)
            header = None if fine is None else _rounded(fine, self._exactly(exact, left, base))
        header = self._exactly(exact, left, base) if header is None else header
        return header if rounded is None else _rounded(rounded, header)

    def _exactly(self, tensors: Sequence[Tensor], places: Sequence[Place], base: Base | None) -> Any:
        return self.numbers(tensors, [_base_words(base, place) for place in places])

    def _lasting(self, entry: Entry) -> bool:
        """Whether a tensor is one of the model's, or of the message it answers, and so continues from round to round,
        unless its field is marked FRESH."""
        if FRESH in self.marks:
            return False
        if self.layout is None or (self.base is not None and self.base.tensor(entry) is not None):
            return True
        return entry.name in self.layout.index and self.layout.entries[self.layout.index[entry.name]] == entry

    def state(self, state: Mapping[str, Tensor], lossy: bool = False) -> Any:
        """Write named tensors of any types; if `lossy`, a run may have them rounded."""
        header, entries = self.entries(state)
        groups = [
            self.values([state[entry.name] for entry in alike], [entry.whole for entry in alike], lossy)
            for alike in _by_type(entries).values()
        ]
        return [header, groups]


class FrameReader:
    """Returns a payload's sections; wire values call its methods.

    Its arrays take at most `limit` bytes, including the dense form of values.
    """

    def __init__(self, parsed: Parsed, layout: Layout | None, base: Base | None, limit: int) -> None:
        if parsed.layout_hash and (layout is None or not layout.hash.startswith(parsed.layout_hash)):
            raise FrameError(
                "layout", "the sender's model differs from this receiver's (names, types or shapes of its entries)"
            )
        if parsed.base_hash and (base is None or not base.digest.startswith(parsed.base_hash)):
            raise FrameError("base", "the reply is coded against a message this receiver does not hold: send in full")
        self.layout = layout if parsed.layout_hash else None
        self.base = base if parsed.base_hash else None
        self.early = parsed.early
        """Whether the frame is of format 1 or 2, which have codings of their own."""
        self.position = -1
        """The current value's position among the payload's wire values."""
        self.own = False
        """Whether this machine wrote the frame, by this version or an earlier one."""
        self._sections = iter(parsed.sections)
        self._left = limit

    def section(self) -> memoryview:
        """The next section. Raises FrameError if there is none."""
        try:
            return next(self._sections)
        except StopIteration:
            raise FrameError("length", "the frame has fewer sections than its header needs") from None

    def finished(self) -> None:
        """Raises FrameError if a section is left over."""
        if next(self._sections, None) is not None:
            raise FrameError("length", "the frame has more sections than its header needs")

    def spend(self, nbytes: int) -> None:
        """Count bytes, before they are allocated, against the limit."""
        self._left -= nbytes
        if self._left < 0:
            raise FrameError("length", "the payload is larger than this receiver is ready to hold")

    def spend_dense(self, entries: Sequence[Entry]) -> None:
        """Count the dense size of entries against the limit, for values that have only parts of them."""
        self.spend(sum(entry.nbytes for entry in entries))

    def entries(self, header: Any) -> list[Entry]:
        """The entries in order, given a header from `FrameWriter.entries`. Raises FrameError."""
        if header is True and self.layout is not None:
            return list(self.layout.entries)
        if isinstance(header, bytes) and self.layout is not None:
            known = self.layout.entries
            chosen = np.unpackbits(np.frombuffer(header, np.uint8), bitorder="little")
            if len(header) != (len(known) + 7) // 8 or chosen[len(known) :].any() or chosen.sum() == len(known):
                raise FrameError("layout", "the choice of entries does not fit the model")
            return [entry for entry, here in zip(known, chosen, strict=False) if here]
        if not isinstance(header, list):
            raise FrameError("header", "the entries of a value are malformed")
        entries = []
        for item in header:
            match item:
                case [str(name), str(dtype), list(shape)] if dtype in DTYPES and len(shape) <= 16:
                    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(n or 1 for n in shape) >= 1 << 56:
                        raise FrameError("length", "a tensor's shape is out of bounds")
                    entries.append(Entry(name, dtype, tuple(shape)))
                case _:
                    raise FrameError("header", "an entry of a value is malformed")
        if len({entry.name for entry in entries}) != len(entries):
            raise FrameError("header", "a value has an entry twice")
        return entries

    def numbers(self, header: Any, dtype: torch.dtype, sizes: Sequence[int], bases: Sequence[Array | None]) -> Tensor:
        """Read the output of `FrameWriter.numbers`: one flat tensor of sum(sizes) elements."""
        total = sum(sizes)
        masked = isinstance(header, list) and header[:1] == [CHANGES]
        self.spend(total * (dtype.itemsize + masked))
        words = np.dtype(f"u{dtype.itemsize}")
        known = _filled(bases, sizes, dtype.itemsize)
        floating = dtype.is_floating_point
        return tensor_of(coding.decode_numbers(self, header, total, words, known, floating), dtype)

    def bits(self, header: Any, size: int) -> Array:
        """Read the output of `FrameWriter.bits`."""
        self.spend(size)
        return run_lengths.decode_bits(self, header, size)

    def places(self, header: Any, size: int) -> Array:
        """Read the output of `FrameWriter.places`."""
        self.spend(size)
        places = run_lengths.decode_places(self, header, size)
        self.spend(places.nbytes)
        return places

    def values(self, header: Any, dtype: torch.dtype, places: Sequence[Place]) -> list[Tensor]:
        """Read the output of `FrameWriter.values`: a flat tensor for each place."""
        match header:
            case [int(kind), bytes(stored), *rest] if kind in (ROUNDED, ROUNDED_BEFORE) and len(rest) == 4:
                if (early := kind == ROUNDED_BEFORE) and not self.early:
                    raise FrameError("coding", "no frame of this format codes rounded values so")
                ways = stored if early else _ways(stored, len(places))
                if len(ways) != len(places):
                    raise FrameError("header", "rounded values do not fit their tensors")
                if not early:
                    rest[0] = _step(rest[0])
                self.spend(
                    max(4, dtype.itemsize) * sum(place.size for place, way in zip(places, ways, strict=True) if way)
                )
                bases = [self._known(place, way) for place, way in zip(places, ways, strict=True)]
                rounded = rounded_values(self, [ways, *rest[:3]], places, bases, early)
                left = [place for place, value in zip(places, rounded, strict=True) if value is None]
                exact = iter(self.values(rest[3], dtype, left))
                return [next(exact) if value is None else value for value in rounded]
        return list(self._exact(header, dtype, places))

    def _known(self, place: Place, way: int) -> Tensor | None:
        """The values that a tensor's difference is added to."""
        if way != ON_GRID:
            return _base_values(self.base, place)
        return _at_position(self.base, self.position, place)

    def _exact(self, header: Any, dtype: torch.dtype, places: Sequence[Place]) -> Sequence[Tensor]:
        sizes = [place.size for place in places]
        bases = [None] * len(places) if self.base is None else [_base_words(self.base, place) for place in places]
        flat = self.numbers(header, dtype, sizes, bases)
        return flat.split_with_sizes(sizes)

    def state(self, header: Any) -> State:
        """Read the output of `FrameWriter.state`."""
        match header:
            case [names, list(groups)]:
                entries = self.entries(names)
            case _:
                raise FrameError("header", "named tensors are malformed")
        kinds = _by_type(entries)
        if len(groups) != len(kinds):
            raise FrameError("header", "named tensors have more or fewer codings than types")
        state: State = {}
        for (dtype, alike), group in zip(kinds.items(), groups, strict=True):
            parts = self.values(group, DTYPES[dtype], [entry.whole for entry in alike])
            for entry, part in zip(alike, parts, strict=True):
                state[entry.name] = part if len(entry.shape) == 1 else part.view(entry.shape)
        return {entry.name: state[entry.name] for entry in entries}


def _unrounded(
    places: Sequence[Place], tensors: Sequence[Tensor], rounded: list[Any] | None
) -> tuple[Sequence[Place], Sequence[Tensor]]:
    """The places and tensors that are not rounded, given the header of those that are."""
    if rounded is None:
        return places, tensors
    left = [i for i, way in enumerate(rounded[0]) if not way]
    return [places[i] for i in left], [tensors[i] for i in left]


def _rounded(header: list[Any], others: Any) -> list[Any]:
    """The item for rounded values, given the output of `round_values` and the item for those that are not rounded."""
    ways, step, points, levels = header
    return [ROUNDED, words.packed_ways(ways), words.bits_of_step(step), points, levels, others]


def _ways(stored: bytes, count: int) -> bytes:
    ways = words.unpacked_ways(stored)
    if len(stored) != (count + 3) // 4 or any(ways[count:]):
        raise FrameError("header", "rounded values do not fit their tensors")
    return ways[:count]


def _step(bits: Any) -> float:
    if type(bits) is not int or not 0 <= bits < 1 << 32:
        raise FrameError("header", "rounded values are malformed")
    return words.step_of(bits)


def _by_type(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Entries by type, in order of first appearance."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.dtype, []).append(entry)
    return found


def _filled(bases: Sequence[Array | None], sizes: Sequence[int], width: int) -> list[Array] | None:
    """The bases, with zeros for missing ones, or None if all are missing."""
    if all(base is None for base in bases):
        return None
    return [np.zeros(n, f"u{width}") if base is None else base for n, base in zip(sizes, bases, strict=True)]


def _base_values(base: Base | None, place: Place) -> Tensor | None:
    """The message's values at a place, flat."""
    return None if base is None else _at(base.tensor(place.entry), place)


def _at_position(base: Base | None, position: int, place: Place) -> Tensor | None:
    """The values at a place of the message's wire value at a position, flat."""
    return None if base is None else _at(base.tensor_at(position, place.entry), place)


def _at(tensor: Tensor | None, place: Place) -> Tensor | None:
    """A tensor's values at a place, flat."""
    if tensor is None:
        return None
    flat = tensor.detach().cpu().reshape(-1)
    return flat if place.kept is None else flat[torch.from_numpy(place.kept)]


def _base_words(base: Base | None, place: Place) -> Array | None:
    """The message's bits at a place, flat."""
    known = None if base is None else base.words(place.entry)
    return known if known is None or place.kept is None else known.take(np.flatnonzero(place.kept))
