"""Messages that are rounded to their difference from what their receivers hold, and what those hold."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from fewbytes.base.errors import UserError
from fewbytes.base.rate import Rate
from fewbytes.core.network import Handler
from fewbytes.core.problem import Id, Problem
from fewbytes.engines.handlers import DOWN_BITS, DOWN_ERROR, LIMIT, Kind, base_from, lossy_for, packed, serialised
from fewbytes.wire import Base, Counted, Frame, base_of, counted, give, pack, unpack

Position = tuple[str, int]
"""Where on a line a client is: the line's name, and the number of the last message that it holds."""
Acknowledged = dict[str, Position]
"""By handler, where a client is."""


@dataclass(frozen=True)
class DeltaStream:
    """What the last message was to one handler, of all clients with one model or of a single client.

    `held`: the message as its receivers hold it, a frame that is not coded. `lost`: by field and name, what rounding
    has lost so far. `steps`: frames of differences to the message before, each; the last leads to this one.
    """

    name: str
    number: int
    held: bytes
    lost: dict[str, dict[str, Tensor]]
    steps: list[bytes]


class Sent(NamedTuple):
    """A frame as it travels: what papers count for it, what replies are coded against (None: nothing in it), and what
    rounding it measured."""

    frame: Frame | None
    counted: Counted
    base: Base | None
    measured: dict[str, float]


class LazyMessage(NamedTuple):
    """A message, in memory or wherever it waits, and its class; those of equal `key` are equal."""

    key: Hashable
    kind: type[Any]
    load: Callable[[], Any]

    @classmethod
    def of(cls, message: Any) -> LazyMessage:
        """One in memory, where it stays until it is sent."""
        return cls(id(message), type(message), lambda: message)


class MessageFrame(NamedTuple):
    """One of the frames that bring a message to a client; those of equal `key` are equal. `kind`: as in `Part`.
    `position`: where the client is once it holds it (None: on no line)."""

    key: Hashable
    kind: Kind
    build: Callable[[], Sent]
    position: Position | None = None


class Downlink:
    """How messages travel: in full or, with a `rate`, rounded.

    What goes to all that are asked, in a part of the network, is one line for the clients of each model. Who has missed
    some of its messages gets the steps since, as long as they take less than half a message, and others all of it. The
    message's tensors become what clients get, so that the server goes on from there, and what that has lost is added
    to the next message (error feedback). A client's own messages are a line of its own; what one has lost is in the
    difference to the next.
    """

    def __init__(self, rate: Rate, problem: Problem, coded: bool) -> None:
        self.rate, self._problem, self._coded = rate, problem, coded
        self.streams: dict[str, DeltaStream] = {}
        self.acknowledged: dict[Id, Acknowledged] = {}
        self._now: dict[str, tuple[Any, Sent]] = {}  # of lines for all: the message as clients get it
        self._part = ""  # of the network, for which these are
        self._recipients: dict[
            tuple[str, str], set[Id]
        ] = {}  # whom a step's first message was for, by handler and part

    def begin(self) -> None:
        """A step is taken."""
        self._recipients = {}

    def restore(self, streams: Iterable[DeltaStream], acknowledged: Mapping[Id, Acknowledged]) -> None:
        """Stand as a checkpoint says."""
        self.streams, self.acknowledged, self._now = {each.name: each for each in streams}, dict(acknowledged), {}

    def arrived(self, client: Id, positions: Acknowledged) -> None:
        """A client holds these."""
        if positions:
            self.acknowledged[client] = self.acknowledged.get(client, {}) | positions

    def rounds(self, handler: Handler, kind: type[Any]) -> bool:
        """Whether a message of that class is rounded."""
        return bool(self.rate) and kind is handler.message and handler.roundable("downlink")

    def to_all(self, handler: Handler, message: Any, asked: Sequence[Id], part: str) -> None:
        """Round a message for all that are asked, in a part of the network. Raises UserError where in a step some are
        sent one and others another, as these would be mixed up."""
        first = self._recipients.setdefault((handler.name, part), set(asked))
        if asked and first.isdisjoint(asked):
            raise UserError(
                f"handler {handler.name!r} is sent a message for some clients and another for others: one is rounded "
                "to its difference from the last, so leave out downlink_bits"
            )
        self._now, self._part = {}, part
        for client in asked:
            name = self._name(handler, client)
            if name not in self._now:
                self._now[name] = self._advance(name, message, client, shared=True)

    def frames(self, handler: Handler, lazy: LazyMessage, client: Id, own: bool) -> list[MessageFrame]:
        """The frames by which a client gets a message: its `own`, or one that `to_all` was given."""
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
        stream, (received, sent), behind = self.streams[name], self._now[name], self._behind(handler, client, name)
        position = name, stream.number
        if behind is None or behind > len(stream.steps):
            return [MessageFrame((*position, "first"), "first", partial(self._first, received, sent, client), position)]
        missed = stream.steps[len(stream.steps) - behind : -1]
        first = stream.number - len(missed)
        return [
            *(MessageFrame((name, n), "missed", partial(_step, step)) for n, step in enumerate(missed, first)),
            MessageFrame(position, "next", lambda: sent, position),
        ]

    def _name(self, handler: Handler, client: Id) -> str:
        return f"{self._part} {handler.name} {self._problem.layout(client).hash.hex()}"

    def _behind(self, handler: Handler, client: Id, name: str) -> int | None:
        """How many of a line's messages a client has not had since one it holds; None if it holds none of it."""
        on, number = self.acknowledged.get(client, {}).get(handler.name, ("", 0))
        return self.streams[name].number - number if on == name and name in self.streams else None

    def _advance(self, name: str, message: Any, client: Id, shared: bool, follows: bool = True) -> tuple[Any, Sent]:
        """A line's next message as its receivers get it, and how: rounded, if there is one before that it `follows`."""
        kind, layout, stream = type(message), self._problem.layout(client), self.streams.get(name)
        number, lost = (1, {}) if stream is None else (stream.number + 1, stream.lost)
        if stream is None or not follows:
            self.streams[name] = DeltaStream(name, number, serialised(message, layout), lost, [])
            frame = pack(message, layout=layout, coded=self._coded)
            return message, Sent(frame, counted(message), base_of(self.streams[name].held[-32:], message), {})
        before = base_from(kind, stream.held, layout)
        lossy = lossy_for(self.rate, self._problem.statistics(client), lost)
        frame = pack(message, layout=layout, base=before, coded=self._coded, lossy=lossy)
        count = counted(message)
        received = unpack(kind, bytes(frame), layout=layout, base=before, limit=LIMIT)
        whole = serialised(received, layout)
        steps = [*stream.steps, bytes(frame)] if shared else []
        while len(steps) > 1 and sum(map(len, steps)) > len(whole) / 2:
            steps.pop(0)
        self.streams[name] = DeltaStream(name, number, whole, lossy.residual if shared else {}, steps)
        if shared:
            give(message, received)
        measured = {DOWN_BITS: lossy.bits_a_value(len(frame)), DOWN_ERROR: lossy.nmse} if lossy.values else {}
        return received, Sent(frame, count, base_of(whole[-32:], received), measured)

    def _own(self, name: str, lazy: LazyMessage, client: Id, follows: bool) -> Sent:
        return self._advance(name, lazy.load(), client, shared=False, follows=follows)[1]

    def _first(self, received: Any, sent: Sent, client: Id) -> Sent:
        frame = pack(received, layout=self._problem.layout(client), coded=self._coded)
        return sent._replace(frame=frame, measured={})

    def _whole(self, handler: Handler, lazy: LazyMessage, client: Id) -> Sent:
        message = lazy.load()
        frame, count = packed(handler, message, self._problem.layout(client), self._coded)
        return Sent(frame, count, None if frame is None else base_of(frame.digest, message), {})


def _step(frame: bytes) -> Sent:
    """One that was missed; papers count the message once."""
    return Sent(Frame.of(frame), Counted(), None, {})
