"""Downloads: differences from what a client already has, and which client has which message."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

from fewbytes.base.errors import UserError
from fewbytes.base.rate import Rate
from fewbytes.codec.delta import Coding, DeltaStream, advanced, merged, started
from fewbytes.core.network import Handler
from fewbytes.core.problem import Id, Problem
from fewbytes.engines.firsts import Firsts
from fewbytes.engines.handlers import DOWN_BITS, DOWN_ERROR, Kind, packed
from fewbytes.wire import Base, Counted, Frame, base_of, counted, give, pack

Position = tuple[str, int]
"""A client's position in a delta stream: the stream's name, and the number of the last message that it has."""
Acknowledged = dict[str, Position]
"""A client's position by handler."""


class Sent(NamedTuple):
    """A frame as sent: its size as papers count it, the base of replies (None: nothing in it) and rounding measures."""

    frame: Frame | None
    counted: Counted
    base: Base | None
    measured: dict[str, float]


class LazyMessage(NamedTuple):
    """A message that is loaded when it is sent, and its class; messages with equal `key` are equal."""

    key: Hashable
    kind: type[Any]
    load: Callable[[], Any]

    @classmethod
    def of(cls, message: Any) -> LazyMessage:
        """Wrap a message that is in memory."""
        return cls(id(message), type(message), lambda: message)


class MessageFrame(NamedTuple):
    """One of the frames that bring a message to a client; frames with equal `key` are equal. `kind`: as in `Part`.
    `position`: the client's position after this frame (None: no delta stream)."""

    key: Hashable
    kind: Kind
    build: Callable[[], Sent]
    position: Position | None = None


class Downlink:
    """Sends messages in full or, with a `rate`, rounded.

    Every message is coded against the first weights of the client's model, if those are the client's as well
    (`others`: clients where they are not). A rounded message to all asked clients of a subset of the network is one
    delta stream per model. A client that missed messages gets one frame that leads from the last one it has; a client
    that has none, the first message and a frame from there; else the whole message. The server's tensors become those
    that clients receive, and the rounding error is added to the next message (error feedback). Messages to a single
    client form their own stream; the difference to the next one contains the rounding error.
    """

    def __init__(self, rate: Rate, problem: Problem, coded: bool, others: set[Id]) -> None:
        self.rate, self._problem, self._coded, self._others = rate, problem, coded, others
        self.wanted = True
        """Whether a message that cannot be rounded is an error; else its handler's messages are sent exactly."""
        self.streams: dict[str, DeltaStream] = {}
        self.acknowledged: dict[Id, Acknowledged] = {}
        self._firsts = Firsts(problem)
        self._now: dict[str, tuple[Any, Sent]] = {}  # by stream to all clients: the message as they receive it
        self._merged: dict[tuple[str, int | None], Frame] = {}  # by stream and earlier message
        self._part = ""  # the subset of the network that receives these
        self._recipients: dict[tuple[str, str], set[Id]] = {}  # of a step's first message, by handler and subset
        self._exact: set[str] = set()  # handlers whose messages cannot be rounded

    def begin(self) -> None:
        """Begin a step."""
        self._recipients = {}

    def restore(self, streams: Iterable[DeltaStream], acknowledged: Mapping[Id, Acknowledged]) -> None:
        """Restore the state of a checkpoint."""
        self.streams, self.acknowledged, self._now = {each.name: each for each in streams}, dict(acknowledged), {}

    def arrived(self, client: Id, positions: Acknowledged) -> None:
        """Note that a client has these messages."""
        if positions:
            self.acknowledged[client] = self.acknowledged.get(client, {}) | positions

    def forget(self, client: Id, first: bytes) -> None:
        """Note that a client could not read a message, and the digest of its first weights: the next comes in full."""
        self.acknowledged.pop(client, None)
        if first != self._firsts.of(client).digest:
            self._others.add(client)

    def rounds(self, handler: Handler, kind: type[Any]) -> bool:
        """Whether messages of this class are rounded."""
        rounded = kind is handler.message and handler.name not in self._exact
        return bool(self.rate) and rounded and handler.roundable("downlink")

    def to_all(self, handler: Handler, message: Any, asked: Sequence[Id], part: str) -> None:
        """Round a message for all asked clients of a subset of the network. Raises UserError if one step sends
        different messages to different clients, because they would share a delta stream, and rounding is wanted."""
        first = self._recipients.setdefault((handler.name, part), set(asked))
        if asked and first.isdisjoint(asked):
            if not self.wanted:
                self._exact.add(handler.name)
                return
            raise UserError(
                f"handler {handler.name!r} gets different messages for different clients in one step, which rounded "
                "differences from the last message do not support: leave out downlink_bits"
            )
        self._now, self._merged, self._part = {}, {}, part
        for client in asked:
            name = self._name(handler, client)
            if name not in self._now:
                self._now[name] = self._advance(name, message, client, shared=True)
        for name in self._now:
            alike = [client for client in asked if self._name(handler, client) == name]
            self._merge(name, type(message), alike, {self._since(handler, client, name) for client in alike})

    def frames(self, handler: Handler, lazy: LazyMessage, client: Id, own: bool) -> list[MessageFrame]:
        """The frames that bring a message to a client: its `own`, or the message given to `to_all`."""
        known = client not in self._others
        if not self.rounds(handler, lazy.kind):
            key = handler.name, lazy.key, self._problem.architecture(client), known
            return [MessageFrame(key, "", partial(self._whole, handler, lazy, client))]
        if own:
            name = f"{handler.name} of {client}"
            follows = self._behind(handler, client, name) == 0 and bool(self.streams[name].unit)
            position = name, self.streams[name].number + 1 if name in self.streams else 1
            build = partial(self._own, name, lazy, client, follows)
            return [MessageFrame(position, "next" if follows else "first", build, position)]
        name = self._name(handler, client)
        stream, (message, sent), since = self.streams[name], self._now[name], self._since(handler, client, name)
        position = name, stream.number
        if since == stream.number - 1 and stream.steps:
            return [MessageFrame(position, "next", lambda: sent, position)]
        if since is not None and (frame := self._merged.get((name, since))) is not None:
            return [MessageFrame((*position, since), "next", lambda: sent._replace(frame=frame, measured={}), position)]
        if known and (later := self._merged.get((name, None))) is not None:
            first = Sent(Frame.of(stream.first), Counted(), None, {})
            return [
                MessageFrame((name, "first"), "origin", lambda: first),
                MessageFrame((*position, None), "next", lambda: sent._replace(frame=later, measured={}), position),
            ]
        whole = partial(self._in_full, message, sent, client)
        return [MessageFrame((*position, "first", known), "first", whole, position)]

    def _name(self, handler: Handler, client: Id) -> str:
        alike = self._problem.layout(client).hash + self._firsts.of(client).digest
        return f"{self._part} {handler.name} {alike.hex()}"

    def _behind(self, handler: Handler, client: Id, name: str) -> int | None:
        """How many messages of a stream a client is behind; None if it has none of them."""
        on, number = self.acknowledged.get(client, {}).get(handler.name, ("", 0))
        return self.streams[name].number - number if on == name and name in self.streams else None

    def _since(self, handler: Handler, client: Id, name: str) -> int | None:
        """The number of the last message of a stream that a client has; None if it has none."""
        behind = self._behind(handler, client, name)
        return None if behind is None else self.streams[name].number - behind

    def _coding(self, client: Id, shared: bool) -> Coding:
        """How a client's messages are sent; `shared`: to others as well, who may hold the first weights."""
        first = self._firsts.of(client) if self._coded and (shared or client not in self._others) else None
        layout, statistics = self._problem.layout(client), self._problem.statistics(client)
        return Coding(layout, self._coded, self.rate, statistics, statistics, first)

    def _advance(self, name: str, message: Any, client: Id, shared: bool, follows: bool = True) -> tuple[Any, Sent]:
        """Advance a stream: the message as received, rounded if it `follows` an earlier one, and its frame."""
        stream, coding, count = self.streams.get(name), self._coding(client, shared), counted(message)
        lossy, number = None, 1 if stream is None else stream.number + 1
        if stream is None or not follows:
            self.streams[name], new, frame = started(name, number, message, coding, shared)
        else:
            self.streams[name], new, frame, lossy = advanced(stream, message, coding, shared)
        if shared:
            give(message, new.message)
        measured = {}
        if lossy is not None and lossy.values:
            measured = {DOWN_BITS: lossy.bits_a_value(len(frame)), DOWN_ERROR: lossy.nmse}
        return new.message, Sent(frame, count, new.base, measured)

    def _own(self, name: str, lazy: LazyMessage, client: Id, follows: bool) -> Sent:
        return self._advance(name, lazy.load(), client, shared=False, follows=follows)[1]

    def _merge(self, name: str, kind: type[Any], clients: Sequence[Id], since: Set[int | None]) -> None:
        """Make the frames that lead from earlier messages of a stream, and from the first, to its last one."""
        stream = self.streams[name]
        kept = {number for number in since if number is None or stream.since(number) is not None}
        wanted = (kept | {None} if since - kept else kept) - {stream.number - 1, stream.number}
        if stream.number > 1 and wanted:
            made = merged(stream, kind, self._coding(clients[0], shared=True), wanted)
            self._merged |= {(name, earlier): Frame.of(frame) for earlier, frame in made.items()}

    def _in_full(self, message: Any, sent: Sent, client: Id) -> Sent:
        coding = self._coding(client, shared=False)
        base = None if coding.first is None else coding.first.on_grid
        return sent._replace(frame=pack(message, layout=coding.layout, base=base, coded=self._coded), measured={})

    def _whole(self, handler: Handler, lazy: LazyMessage, client: Id) -> Sent:
        message, first = lazy.load(), self._coding(client, shared=False).first
        base = None if first is None else first.exact
        frame, count = packed(handler, message, self._problem.layout(client), base, self._coded)
        return Sent(frame, count, None if frame is None else base_of(frame.digest, message), {})
