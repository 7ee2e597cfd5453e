"""Rounded downloads: differences from the message that a client already has, and which client has which."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from fewbytes.base.errors import UserError
from fewbytes.base.rate import Rate
from fewbytes.codec.delta import DeltaStream, advanced, received
from fewbytes.core.network import Handler
from fewbytes.core.problem import Id, Problem
from fewbytes.engines.handlers import DOWN_BITS, DOWN_ERROR, Kind, lossy_for, packed
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

    A message to all asked clients of a subset of the network is one delta stream per model. A client that missed
    messages gets the steps since, if they take less than half a message; else the whole message. The server's tensors
    become those that clients receive, and the rounding error is added to the next message (error feedback). Messages
    to a single client form their own stream; the difference to the next one contains the rounding error.
    """

    def __init__(self, rate: Rate, problem: Problem, coded: bool) -> None:
        self.rate, self._problem, self._coded = rate, problem, coded
        self.streams: dict[str, DeltaStream] = {}
        self.acknowledged: dict[Id, Acknowledged] = {}
        self._now: dict[str, tuple[Any, Sent]] = {}  # by stream to all clients: the message as they receive it
        self._part = ""  # the subset of the network that receives these
        self._recipients: dict[tuple[str, str], set[Id]] = {}  # of a step's first message, by handler and subset

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

    def rounds(self, handler: Handler, kind: type[Any]) -> bool:
        """Whether messages of this class are rounded."""
        return bool(self.rate) and kind is handler.message and handler.roundable("downlink")

    def to_all(self, handler: Handler, message: Any, asked: Sequence[Id], part: str) -> None:
        """Round a message for all asked clients of a subset of the network. Raises UserError if one step sends
        different messages to different clients, because they would share a delta stream."""
        first = self._recipients.setdefault((handler.name, part), set(asked))
        if asked and first.isdisjoint(asked):
            raise UserError(
                f"handler {handler.name!r} gets different messages for different clients in one step, which rounded "
                "differences from the last message do not support: leave out downlink_bits"
            )
        self._now, self._part = {}, part
        for client in asked:
            name = self._name(handler, client)
            if name not in self._now:
                self._now[name] = self._advance(name, message, client, shared=True)

    def frames(self, handler: Handler, lazy: LazyMessage, client: Id, own: bool) -> list[MessageFrame]:
        """The frames that bring a message to a client: its `own`, or the message given to `to_all`."""
        if not self.rounds(handler, lazy.kind):
            key = handler.name, lazy.key, self._problem.architecture(client)
            return [MessageFrame(key, "", partial(self._whole, handler, lazy, client))]
        if own:
            name = f"{handler.name} of {client}"
            follows = self._behind(handler, client, name) == 0
            position = name, self.streams[name].number + 1 if name in self.streams else 1
            build = partial(self._own, name, lazy, client, follows)
            return [MessageFrame(position, "next" if follows else "first", build, position)]
        name = self._name(handler, client)
        stream, (message, sent), behind = self.streams[name], self._now[name], self._behind(handler, client, name)
        position = name, stream.number
        steps = None if behind is None else stream.since(stream.number - behind)
        if steps is None:
            return [MessageFrame((*position, "first"), "first", partial(self._first, message, sent, client), position)]
        missed = steps[:-1]
        first = stream.number - len(missed)
        return [
            *(MessageFrame((name, n), "missed", partial(_step, step)) for n, step in enumerate(missed, first)),
            MessageFrame(position, "next", lambda: sent, position),
        ]

    def _name(self, handler: Handler, client: Id) -> str:
        return f"{self._part} {handler.name} {self._problem.layout(client).hash.hex()}"

    def _behind(self, handler: Handler, client: Id, name: str) -> int | None:
        """How many messages of a stream a client is behind; None if it has none of them."""
        on, number = self.acknowledged.get(client, {}).get(handler.name, ("", 0))
        return self.streams[name].number - number if on == name and name in self.streams else None

    def _advance(self, name: str, message: Any, client: Id, shared: bool, follows: bool = True) -> tuple[Any, Sent]:
        """Advance a stream: the message as received, rounded if it `follows` an earlier one, and its frame."""
        layout, stream = self._problem.layout(client), self.streams.get(name)
        if stream is None or not follows:
            number, lost = (1, {}) if stream is None else (stream.number + 1, stream.lost)
            new = received(message, layout)
            self.streams[name] = DeltaStream(name, number, new.kept, lost, [])
            return message, Sent(pack(message, layout=layout, coded=self._coded), counted(message), new.base, {})
        lossy, count = lossy_for(self.rate, self._problem.statistics(client), stream.lost), counted(message)
        self.streams[name], new, frame = advanced(stream, message, layout, self._coded, lossy, shared)
        if shared:
            give(message, new.message)
        measured = {DOWN_BITS: lossy.bits_a_value(len(frame)), DOWN_ERROR: lossy.nmse} if lossy.values else {}
        return new.message, Sent(frame, count, new.base, measured)

    def _own(self, name: str, lazy: LazyMessage, client: Id, follows: bool) -> Sent:
        return self._advance(name, lazy.load(), client, shared=False, follows=follows)[1]

    def _first(self, message: Any, sent: Sent, client: Id) -> Sent:
        frame = pack(message, layout=self._problem.layout(client), coded=self._coded)
        return sent._replace(frame=frame, measured={})

    def _whole(self, handler: Handler, lazy: LazyMessage, client: Id) -> Sent:
        message = lazy.load()
        frame, count = packed(handler, message, self._problem.layout(client), self._coded)
        return Sent(frame, count, None if frame is None else base_of(frame.digest, message), {})


def _step(frame: bytes) -> Sent:
    """A step that was missed; papers count the message once."""
    return Sent(Frame.of(frame), Counted(), None, {})
