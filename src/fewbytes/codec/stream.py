"""Versions of a model to many receivers: each gets what changed since what it holds, or all of it."""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fewbytes.base.errors import FrameError, UserError
from fewbytes.base.state import State
from fewbytes.codec.coder import LIMIT, check_bits, decoded, same
from fewbytes.codec.delta import Coding, DeltaStream, advanced, merged, serialised, started
from fewbytes.codec.first import First
from fewbytes.codec.states import (
    AnyState,
    Exact,
    Packable,
    check_exact,
    copied,
    exact_names,
    layout_of,
    packable,
    unpackable,
)
from fewbytes.wire import Parsed, pack, pack_state, payload, unpack, unpack_state
from fewbytes.wire.fields import PER_ITEM
from fewbytes.wire.header import MOST_ITEMS

UNLIMITED = 1 << 62  # bytes, of what was made here
COUNTER = "num_batches_tracked"  # of batch normalisation


@payload
class Versions:
    """What travels: the last `frames` up to a `version` of a stream, or a whole message and what leads on from it.
    Streams that round send the last frame only."""

    stream: str
    version: int
    whole: bool
    frames: list[bytes]


@payload
class Merged:
    """What travels: one frame that leads from an earlier version, `since`, to a `version` of a stream."""

    stream: str
    version: int
    since: int
    frame: bytes


@dataclass
class Sender:
    """What a stream saves: the version that receivers have, whole, and what leads to it (`DeltaStream`, without what it
    holds); by receiver, the version that it confirmed, and the last that it was sent; receivers that may not hold the
    first weights; entries that were integers."""

    whole: bytes
    stream: DeltaStream
    receivers: dict[str, int]
    sent: dict[str, int]
    others: list[str] = field(default_factory=list)
    integers: list[str] = field(default_factory=list)


@dataclass
class Receiver:
    """What a decoder keeps: the stream it follows, its version, and that version as an encoded message."""

    stream: str
    version: int
    held: bytes


class Stream:
    """The sender's side: `advance` makes a version of a state, and `message` brings one receiver to it.

    `bits`, `exact`: as in `Encoder`, for differences; averages of integers stay exact, too. The first message is whole;
    with `bits`, its values move to a grid, by at most 2^-20 of the largest. A tensor whose largest value is 2^14 times
    the others' root mean square, such as a mask of -1e9, stays exact, as the others would be lost on its grid. `first`:
    weights that each receiver's `Decoder` was given as well, equal bit for bit: the first message is its difference
    from these, some hundred bytes if they are equal. `feedback`: whether what rounding lost is added to the next
    version. It must be if states are made from what receivers hold, as an average of models that they trained is; a
    server that takes steps on a model of its own has it in that model already. Receivers are named by anything hashable
    with a distinct `str`.

    >>> import torch
    >>> from fewbytes.codec import Decoder, Stream
    >>> stream, decoder, model = Stream(bits=1), Decoder(), torch.nn.Linear(300, 10)
    >>> held = stream.advance(model.state_dict())
    >>> first = stream.message("hospital 3")
    >>> received = decoder.decode(first)
    >>> stream.received("hospital 3", decoder.version)
    >>> held = stream.advance({name: value + torch.randn_like(value) / 100 for name, value in received.items()})
    >>> second = stream.message("hospital 3")
    >>> all(torch.equal(value, held[name]) for name, value in decoder.decode(second).items())
    True
    >>> len(second) < len(first) / 8
    True
    """

    def __init__(
        self, bits: float | None = None, *, exact: Exact = None, feedback: bool = True, first: AnyState | None = None
    ) -> None:
        check_exact(exact)
        self._rate, self._exact, self._feedback = check_bits(bits), exact, feedback
        self._first = _first(first)
        self._stream = DeltaStream(secrets.token_hex(8), 0, b"", {}, [])
        self._receivers: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._others: set[str] = set()
        self._integers: set[str] = set()
        self._given: Packable | None = None
        self._now: Packable | None = None
        self._whole: dict[bool, bytes] = {}  # by whether it is coded against the first weights
        self._merged: dict[int | None, bytes | None] = {}  # by the version that it leads from; None: the first message

    @property
    def name(self) -> str:
        """What tells this stream's versions from those of another."""
        return self._stream.name

    @property
    def version(self) -> int:
        """The number of the last version; 0: there is none."""
        return self._stream.number

    @property
    def held(self) -> Any:
        """The last version, as receivers have it: what replies are coded against."""
        if self._now is None:
            raise UserError("the stream has no version yet: call advance first")
        return unpackable(copied(self._now))

    def is_last(self, state: AnyState) -> bool:
        """Whether a state is the one that the last version was made of."""
        return self._given is not None and same(self._packed(state), self._given)

    def advance(self, state: AnyState) -> Any:
        """Make a state the next version; returns it as receivers will have it. A state equal to the last one makes no
        version. One of other names, types or shapes is sent whole, as is one with nothing in common with the last: its
        difference from that is larger than itself. A layer's counter of batches keeps the type that it had at first:
        averages of it have fractions, which `load_state_dict` drops."""
        packed = copied(self._packed(state))
        if self._given is not None and same(packed, self._given):
            return self.held
        stream, coding = self._stream, self._coding(packed)
        if self._follows(packed, coding.exact):
            self._stream, new, *_ = advanced(stream, packed, coding, shared=True)
        else:
            coding = replace(coding, first=self._first if self._near(packed) else None)
            self._stream, new, _ = started(stream.name, stream.number + 1, packed, coding)
        if not self._feedback:
            self._stream.lost.clear()
        self._given, self._now, self._whole, self._merged = packed, new.message, {}, {}
        return self.held

    def message(self, receiver: Hashable) -> bytes:
        """What brings a receiver to the last version: the differences that it lacks, or all of it."""
        stream, since = self._stream, self._receivers.get(str(receiver), -1)
        sure = self._sent.get(str(receiver), -1) == since  # else it may hold a later version, and has not confirmed it
        self._sent[str(receiver)] = stream.number
        steps = stream.since(since)
        if steps is not None and len(steps) <= 1:
            return bytes(pack(Versions(stream.name, stream.number, False, steps), coded=False))
        whole = self._frames(known=str(receiver) not in self._others)
        most = sum(map(len, whole))
        frame = self._merge(since) if sure and steps is not None and len(steps) > 1 and stream.unit else None
        if frame is not None and len(frame) <= most:
            return bytes(pack(Merged(stream.name, stream.number, since, frame), coded=False))
        if steps is not None and sum(map(len, steps)) <= most:
            return bytes(pack(Versions(stream.name, stream.number, False, steps), coded=False))
        return bytes(pack(Versions(stream.name, stream.number, True, whole), coded=False))

    def received(self, receiver: Hashable, version: int) -> None:
        """A receiver has confirmed that it holds a version."""
        self._receivers[str(receiver)] = version
        self._sent.setdefault(str(receiver), version)

    def forget(self, receiver: Hashable, *, holds_first: bool = False) -> None:
        """Forget what a receiver holds, including the first weights unless it `holds_first`: it gets the next message
        whole."""
        self._receivers.pop(str(receiver), None)
        (self._others.discard if holds_first else self._others.add)(str(receiver))

    def state(self) -> bytes:
        """What to save to continue after a restart: see `load`."""
        whole = b"" if self._now is None else self._message(known=False)
        return bytes(
            pack_state(
                Sender(
                    whole, replace(self._stream, held=b""), self._receivers, self._sent, sorted(self._others),
                    sorted(self._integers),
                )
            )
        )  # fmt: skip

    def load(self, data: bytes) -> None:
        """Resume from what `state` returned. Raises DecodeError if it is damaged."""
        kept = unpack_state(Sender, data)
        self._given, self._now, self._whole, self._merged, held = None, None, {}, {}, b""
        if kept.whole:
            self._whole = {False: kept.whole}
            self._now = decoded(kept.whole, None, UNLIMITED)
            held = serialised(self._now, layout_of(self._now))
        self._stream, self._receivers, self._sent = replace(kept.stream, held=held), kept.receivers, kept.sent
        self._others, self._integers = set(kept.others), set(kept.integers)

    def _packed(self, state: AnyState) -> Packable:
        packed = packable(state)
        if self._now is not None:
            _keep_counters(packed.values.dense(), self._now.values.dense())
        self._integers |= {name for name, value in packed.values.dense().items() if not value.is_floating_point()}
        return packed

    def _follows(self, packed: Packable, exact: Set[str]) -> bool:
        """Whether a state is sent as its difference from the last."""
        before = self._now
        if before is None or type(before) is not type(packed) or layout_of(before) != layout_of(packed):
            return False
        return not self._rate or not _apart(packed, before.values.dense(), exact)

    def _coding(self, packed: Packable) -> Coding:
        exact = exact_names(packed, self._exact) | self._integers if self._rate else frozenset()
        return Coding(layout_of(packed), rate=self._rate, exact=exact)

    def _near(self, packed: Packable) -> bool:
        """Whether a state is worth coding against the first weights."""
        first = self._first
        if first is None or layout_of(packed) != first.layout:
            return False
        return not _apart(packed, first.exact.tensors, exact_names(packed, self._exact))

    def _merge(self, since: int | None) -> bytes | None:
        """One frame that leads from an earlier version, or from the first message, to the last version."""
        if since not in self._merged and self._now is not None:
            coding = self._coding(self._now)
            if since is None and Parsed(self._stream.first).base_hash:
                coding = replace(coding, first=self._first)
            made = merged(self._stream, type(self._now), coding, [since])
            self._merged[since] = made.get(since)
        return self._merged.get(since)

    def _frames(self, known: bool) -> list[bytes]:
        """The last version for a receiver that has none. `known`: it holds the first weights, if there are any."""
        whole, first = self._message(known), self._stream.first
        if known and self._first is not None and first and self._stream.number > 1:
            later = self._merge(None)
            if later is not None and len(first) + len(later) < len(whole):
                return [first, later]
        return [whole]

    def _message(self, known: bool) -> bytes:
        """The last version, whole or, if the receiver has `known` first weights near it, coded against them."""
        if self._now is None:
            raise UserError("the stream has no version yet: call advance first")
        near = known and self._near(self._now)
        if near not in self._whole:
            coding = replace(self._coding(self._now), first=self._first if near else None)
            layout = coding.layout if near else None
            self._whole[near] = bytes(pack(self._now, layout=layout, base=coding.against))
        return self._whole[near]


class Decoder:
    """The receiver's side of a `Stream`: it holds the last version.

    `limit`: the most bytes that a decoded state may take. `first`: the weights that the stream was given as well.

    >>> import torch
    >>> from fewbytes.codec import Decoder, Stream
    >>> stream, decoder = Stream(), Decoder()
    >>> held = stream.advance({"w": torch.ones(3)})
    >>> decoder.decode(stream.message("hospital 3"))
    {'w': tensor([1., 1., 1.])}
    >>> decoder.version
    1
    """

    def __init__(self, limit: int = LIMIT, *, first: AnyState | None = None) -> None:
        self._limit, self._first = limit, _first(first)
        self._kept = Receiver("", 0, b"")
        self._now: Packable | None = None

    @property
    def version(self) -> int:
        """The number of the version that this receiver holds, to confirm to the sender; 0: none."""
        return self._kept.version

    def decode(self, data: bytes) -> Any:
        """The state that a message leads to. Raises DecodeError, of code `base` if the message needs a version not
        held here: have the sender `forget` this receiver, and send again. What is held stays then."""
        parsed = Parsed(data, max(MOST_ITEMS, self._limit // PER_ITEM))
        kind: type[Versions | Merged] = Merged if parsed.kind == Merged.__name__ else Versions
        update = unpack(kind, parsed, limit=self._limit)
        version, now = self._kept.version, self._now
        if isinstance(update, Versions) and update.whole:
            if not update.frames:
                raise FrameError("type", "a whole message has a frame")
            now = decoded(update.frames[0], None, self._limit, self._first)
            for frame in update.frames[1:]:
                now = decoded(frame, now, self._limit)
        else:
            if isinstance(update, Merged):
                new = {update.since: update.frame}
            else:
                new = dict(enumerate(update.frames, update.version - len(update.frames)))
            if update.stream != self._kept.stream or now is None or version not in {*new, update.version}:
                raise FrameError("base", "the message is coded against a version that this receiver does not hold")
            for frame in (frame for before, frame in new.items() if before >= version):
                now = decoded(frame, now, self._limit)
        self._kept = Receiver(update.stream, update.version, b"")
        self._now = now
        return unpackable(copied(now))

    def adopt(self, name: str, version: int, state: AnyState) -> None:
        """Hold a version that came another way, such as in a plain message: the `name` and `version` of its stream."""
        self._kept, self._now = Receiver(name, version, b""), copied(packable(state))

    def state(self) -> bytes:
        """What to save to continue after a restart: see `load`."""
        held = b"" if self._now is None else bytes(pack(self._now, coded=False))
        return bytes(pack_state(Receiver(self._kept.stream, self._kept.version, held)))

    def load(self, data: bytes) -> None:
        """Resume from what `state` returned. Raises DecodeError if it is damaged."""
        self._kept = unpack_state(Receiver, data)
        self._now = decoded(self._kept.held, None, UNLIMITED) if self._kept.held else None


def _first(state: AnyState | None) -> First | None:
    """First weights, in memory of their own."""
    return None if state is None else First(copied(packable(state)).values.dense())


def _keep_counters(state: State, before: Mapping[str, Tensor]) -> None:
    """Give counters of batches the type that they had before: one that has changed would make a message whole."""
    for name, value in state.items():
        if name.rpartition(".")[2] == COUNTER and name in before:
            state[name] = value.to(before[name].dtype)


def _apart(packed: Packable, before: Mapping[str, Tensor], exact: Set[str]) -> bool:
    """Whether two states of one layout have nothing in common; `exact`: entries that are not counted, such as
    statistics of normalisation, which in a young model are of another size from round to round."""
    size = difference = 0.0
    for name, value in packed.values.dense().items():
        if value.is_floating_point() and name not in exact:
            size += float(value.double().square().sum())
            difference += float((value.double() - before[name].double()).square().sum())
    return not difference <= size
