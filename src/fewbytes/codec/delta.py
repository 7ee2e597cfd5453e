"""Messages as differences from the last one: what senders and receivers do, whatever a message is made of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from fewbytes.base.errors import FrameError
from fewbytes.base.ranges import EXACT, FRESH
from fewbytes.base.rate import ALL, Rate
from fewbytes.base.state import State
from fewbytes.codec.first import First
from fewbytes.wire import Base, Dense, Frame, Layout, Lossy, Parsed, base_of, older, pack, unpack
from fewbytes.wire.frame import digest_of
from fewbytes.wire.grid import DIGITS, GRID_TYPES, Grid, outlying, snapped, unit_of
from fewbytes.wire.schema import leaves_of
from fewbytes.wire.value import is_wire_value

LIMIT = 1 << 40  # maximum bytes of a serialised message
SMALL = 0.1  # of a serialised message: maximum of the first message's frame to be kept, for receivers that come later


class Received(NamedTuple):
    """A message as a receiver has it, the base of its reply, and the serialised message to keep (empty: nothing)."""

    message: Any
    base: Base
    kept: bytes


@dataclass(frozen=True)
class DeltaStream:
    """The last of a sequence of messages with the same layout.

    `held`: the message as its receivers have it, serialised. `lost`: the accumulated rounding error, by field and name.
    `steps`: the last messages' frames; the last leads to this message. `first`: the frame of the first message (empty:
    too long to keep). `unit`: of the grid that rounded values are on (0: on none); `carry`: as in `Grid`; `sizes`: of
    each of `steps`, the smallest step that values were rounded to (0: none); `finest`: that since the first message.
    `apart`: the names of tensors that are on no grid, as `outlying` found when the stream began.
    """

    name: str
    number: int
    held: bytes
    lost: dict[str, dict[str, Tensor]]
    steps: list[bytes] = field(default_factory=list)
    first: bytes = b""
    unit: float = 0.0
    carry: dict[str, float] = field(default_factory=dict)
    sizes: list[float] = field(default_factory=list)
    finest: float = 0.0
    apart: list[str] = field(default_factory=list)

    def since(self, number: int) -> list[bytes] | None:
        """The steps that lead from an earlier message to this one; None if they are not kept."""
        behind = self.number - number
        return self.steps[len(self.steps) - behind :] if 0 <= behind <= len(self.steps) else None


@dataclass(frozen=True)
class Coding:
    """How a stream's messages are sent: their layout, whether they are `coded`, the rate of rounding, the names of
    tensors that stay `exact` or, among these, are rounded after all, but finely (`fine`), and what its receivers hold
    before the first message (None: nothing). `apart`: those of the `exact` ones that a grid would suit badly."""

    layout: Layout
    coded: bool = True
    rate: Rate = ALL
    exact: Set[str] = frozenset()
    fine: Set[str] = frozenset()
    first: First | None = None
    apart: Set[str] = frozenset()

    def beside(self, names: Iterable[str]) -> Coding:
        """The same with these names in place of those that lay `apart`."""
        apart = frozenset(names)
        return replace(self, exact=(self.exact - self.apart) | apart, apart=apart)

    @property
    def against(self) -> Base | None:
        """What a first or whole message is coded against."""
        if self.first is None:
            return None
        return self.first.on_grid if self.rate else self.first.exact


def serialised(message: Any, layout: Layout) -> bytes:
    """A message as sender and receiver keep it: an uncoded frame, whose digest identifies it at both ends."""
    return bytes(pack(message, layout=layout, coded=False))


def base_from(kind: type[Any], frame: bytes, layout: Layout) -> Base:
    """The base of the next message, from the frame that `serialised` returned."""
    return base_of(digest_of(frame), unpack(kind, frame, layout=layout, limit=LIMIT))


def received(message: Any, layout: Layout) -> Received:
    """A message that came whole."""
    kept = serialised(message, layout)
    return Received(message, base_of(digest_of(kept), message), kept)


def base_for(frame: Parsed, message: Any, layout: Layout) -> Base:
    """A message that came whole, as the base of a frame, whose sender may have named it as format 2 did."""
    kept = serialised(message, layout)
    if not digest_of(kept).startswith(frame.base_hash):
        kept = older.written(Parsed(kept), layout.hash)
    return base_of(digest_of(kept), message)


def followed(kind: type[Any], frame: bytes | memoryview, layout: Layout, before: bytes | None) -> Received:
    """A message that came as its difference from the message `before`. Raises FrameError if that is another one."""
    if before is None:
        raise FrameError("base", "the message is coded against one that this client does not have: send in full")
    return received(unpack(kind, frame, layout=layout, base=base_from(kind, before, layout)), layout)


def started(
    name: str, number: int, message: Any, coding: Coding, shared: bool = True
) -> tuple[DeltaStream, Received, Frame]:
    """A stream that begins with a message in full: as `advanced`. If later ones are rounded, its values move to a grid,
    by less than 2^-20 of the largest."""
    layout, first, unit = coding.layout, coding.first, 0.0
    if coding.rate:
        coding = coding.beside(())
        coding = coding.beside(name for _, state in _on_grid(message, coding.exact) for name in outlying(state))
        unit = unit_of(value for _, state in _on_grid(message, coding.exact) for value in state.values())
        if first is not None and unit <= first.unit:
            unit = first.unit  # so that the first weights, if these are they, become those of `first`
        message = _moved(message, coding, unit)
    frame = pack(message, layout=layout, base=coding.against, coded=coding.coded)
    new = received(message, layout)
    kept = bytes(frame) if shared and unit and len(frame) < SMALL * len(new.kept) else b""
    return DeltaStream(name, number, new.kept, {}, first=kept, unit=unit, apart=sorted(coding.apart)), new, frame


def advanced(
    stream: DeltaStream, message: Any, coding: Coding, shared: bool
) -> tuple[DeltaStream, Received, Frame, Lossy | None]:
    """A stream's next message: the stream after it, the message as receivers will have it, its frame, and how it was
    rounded (None: not at all, or in full, as values had outgrown the grid).

    `shared`: whether the stream has several receivers, of which some may miss this message: then its step is kept, and
    what rounding lost, to be added to the next message.
    """
    layout, lossy = coding.layout, None
    if coding.rate and not stream.unit:  # of a run that began before there were grids
        return *started(stream.name, stream.number + 1, message, coding, shared), None
    coding = coding.beside(stream.apart)
    if coding.rate:
        lost = {path: dict(tensors) for path, tensors in stream.lost.items()}
        grid = Grid(stream.unit, carry=dict(stream.carry))
        lossy = Lossy(coding.rate, coding.exact, lost, grid=grid, fine=coding.fine)
    before = base_from(type(message), stream.held, layout)
    frame = pack(message, layout=layout, base=before, coded=coding.coded, lossy=lossy)
    data = bytes(frame)
    new = received(unpack(type(message), data, layout=layout, base=before, limit=LIMIT), layout)
    if shared and stream.unit and not _fits(new.message, coding.exact, stream.unit):
        return *started(stream.name, stream.number + 1, _restored(message, stream.lost, coding), coding), None
    grid = Grid(stream.unit) if lossy is None or lossy.grid is None else lossy.grid
    steps, sizes = ([*stream.steps, data], [*stream.sizes, grid.finest]) if shared else ([], [])
    while len(steps) > 1 and sum(map(len, steps)) > len(new.kept):
        steps.pop(0)
    kept = lossy.residual if shared and lossy is not None else {}
    after = replace(
        stream, number=stream.number + 1, held=new.kept, lost=kept, steps=steps, sizes=sizes[-len(steps) :],
        carry=grid.carry, finest=_least([stream.finest, grid.finest]),
    )  # fmt: skip
    return after, new, frame, lossy


def merged(
    stream: DeltaStream, kind: type[Any], coding: Coding, since: Collection[int | None]
) -> dict[int | None, bytes]:
    """By earlier message (None: the first), one frame that leads from it to the last message; without those for which
    there is none, or it would be longer than the last message in full."""
    coding = coding.beside(stream.apart)
    now, found = unpack(kind, stream.held, layout=coding.layout, limit=LIMIT), dict[int | None, bytes]()
    for earlier, base, finest in _bases(stream, now, coding, since):
        lossy = Lossy(coding.rate, coding.exact, grid=Grid(stream.unit, finest or stream.unit))
        frame = bytes(pack(now, layout=coding.layout, base=base, lossy=lossy))
        there = unpack(kind, frame, layout=coding.layout, base=base, limit=LIMIT)
        if len(frame) < len(stream.held) and serialised(there, coding.layout) == stream.held:
            found[earlier] = frame
    return found


def _least(steps: Iterable[float]) -> float:
    """The smallest of the steps that are not 0; 0 for none."""
    return min((step for step in steps if step), default=0.0)


def _bases(
    stream: DeltaStream, now: Any, coding: Coding, since: Collection[int | None]
) -> Iterator[tuple[int | None, Base, float]]:
    """The values on the grid of earlier messages, each valid until the next is asked for, and the smallest step since:
    of the first message, and of others the last message's less the differences since."""
    if None in since and stream.first:
        message = unpack(type(now), stream.first, layout=coding.layout, base=coding.against, limit=LIMIT)
        whole = received(message, coding.layout).base
        yield None, Base(whole.digest, {}, whole.values), stream.finest
    oldest = min((number for number in since if number is not None), default=stream.number)
    whole = base_of(b"", now)
    zeros = {name: value.new_zeros(value.shape) for name, value in whole.tensors.items()}
    none = [{name: value.new_zeros(value.shape) for name, value in state.items()} for state in whole.values]
    values: list[State] = [{} for _ in whole.values]
    for position, state in _on_grid(now, coding.exact):
        values[position] = {name: value.clone() for name, value in state.items()}
    for behind, step in enumerate(reversed(stream.since(max(oldest, stream.number - len(stream.steps))) or []), 1):
        digest = Parsed(step).base_hash + bytes(16)
        try:
            difference = unpack(type(now), step, layout=coding.layout, base=Base(digest, zeros, none), limit=LIMIT)
        except FrameError:  # what is not on the grid is not always a difference to zeros
            return
        for position, state in _on_grid(difference, coding.exact):
            for name in state.keys() & values[position].keys():
                values[position][name] -= state[name]
        if stream.number - behind in since:
            yield stream.number - behind, Base(digest, {}, values), _least(stream.sizes[-behind:])


def _on_grid(message: Any, exact: Set[str]) -> Iterator[tuple[int, State]]:
    """The tensors of a message that are rounded to a grid, by the position of their wire value."""
    wire = (leaf for leaf in leaves_of(message) if is_wire_value(leaf.value))
    for position, leaf in enumerate(wire):
        if isinstance(leaf.value, Dense) and not leaf.marks & {EXACT, FRESH}:
            state = leaf.value.state
            yield position, {n: v for n, v in state.items() if v.dtype in GRID_TYPES and n not in exact}


def _restored(message: Any, lost: Mapping[str, State], coding: Coding) -> Any:
    """A copy of a message with what rounding has lost of earlier ones."""
    copy = unpack(type(message), serialised(message, coding.layout), layout=coding.layout, limit=LIMIT)
    for leaf in leaves_of(copy):
        for name, value in lost.get(f"{type(message).__name__}.{leaf.path}", {}).items():
            if name in leaf.tensors:
                leaf.tensors[name].add_(value)
    return copy


def _moved(message: Any, coding: Coding, unit: float) -> Any:
    """A copy of a message with its values moved to multiples of `unit`."""
    copy = unpack(type(message), serialised(message, coding.layout), layout=coding.layout, limit=LIMIT)
    for _, state in _on_grid(copy, coding.exact):
        for name, value in snapped(state, unit).items():
            state[name].copy_(value)
    return copy


def _fits(message: Any, exact: Set[str], unit: float) -> bool:
    """Whether all values are small enough to be on a grid exactly."""
    states = (state for _, state in _on_grid(message, exact))
    return all(float(v.abs().max()) < unit * 2.0**DIGITS for state in states for v in state.values() if v.numel())
