"""Requests to clients: messages are numbered, rounded, packed once, and dropped after their last reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fewbytes.core.network import Handler
from fewbytes.core.problem import Id
from fewbytes.engines.dispatcher import Dispatcher
from fewbytes.engines.downlink import Acknowledged, Downlink, LazyMessage, MessageFrame, Position
from fewbytes.engines.handlers import Handlers, Job, Kind, Part
from fewbytes.engines.terms import Origin, Terms
from fewbytes.engines.waiting import WaitingMessages
from fewbytes.wire import Base, Counted, Frame


@dataclass
class Packed:
    """One packed message, for any number of clients."""

    handler: str
    waited: bool  # whether it waited for this request, instead of causing it
    number: int
    message: Any  # None if it waited
    frame: Frame | None
    counted: Counted
    base: Base | None
    at: str
    left: int  # clients that have not answered yet
    kind: Kind  # as in `Part`
    position: Position | None  # a client's position after receiving it
    measured: dict[str, float]  # rounding measures
    _whole: bytes | None = None  # the joined frame, cached while other clients need it

    @property
    def length(self) -> int:
        """Bytes of the frame."""
        return 0 if self.frame is None else len(self.frame)

    def whole(self) -> bytes:
        """The joined frame."""
        whole = self._whole if self._whole is not None else bytes(self.frame or b"")
        self._whole = whole if self.left > 1 else None
        return whole

    def part(self) -> Part:
        """Its entry in a job."""
        return Part(self.handler, self.number, self.at, self.length, self.kind)


@dataclass
class Request:
    """One request to a client: the messages that waited for it, then the call's own message."""

    parts: list[Packed]

    @property
    def length(self) -> int:
        """Bytes of all frames."""
        return sum(part.length for part in self.parts)

    @property
    def counted(self) -> Counted:
        """The total size as papers count it."""
        return sum((part.counted for part in self.parts), Counted())

    @property
    def base(self) -> Base | None:
        """The base of the reply."""
        return Base.together([part.base for part in self.parts if part.base is not None])

    @property
    def message(self) -> Any:
        """The call's own message."""
        return next((part.message for part in self.parts if not part.waited), None)

    @property
    def positions(self) -> Acknowledged:
        """The client's positions after receiving all of it."""
        return {part.handler: part.position for part in self.parts if part.position is not None}

    @property
    def measured(self) -> dict[str, float]:
        """The rounding measures."""
        return {name: value for part in self.parts for name, value in part.measured.items()}

    def fill(self, job: Job) -> list[bytes]:
        """Enter the messages in a job; returns the frames to send with it, those not stored elsewhere."""
        own = [part.part() for part in self.parts if not part.waited and part.frame is not None]
        job.waited = [part.part() for part in self.parts if part.waited]
        job.origin, job.message = (own[0] if len(own) > 1 else None), own[-1] if own else None
        return [part.whole() for part in self.parts if part.frame is not None and not part.at]


class _Planned(NamedTuple):
    """One frame of a client's request; `key` is the same for equal frames."""

    key: Hashable
    planned: MessageFrame
    handler: Handler
    message: Any  # None if it waited
    waited: bool


class Outbox:
    """The state behind a run's requests: delta streams, and messages that wait for clients."""

    def __init__(self, terms: Terms, handlers: Handlers, dispatcher: Dispatcher) -> None:
        self.handlers, self.dispatcher, self._folder = handlers, dispatcher, terms.waiting
        self.downlink = Downlink(terms.downlink, terms.task.problem, terms.coded, dispatcher.roster.other_firsts)
        self.downlink.wanted = terms.downlink_wanted
        self.waiting = WaitingMessages(terms.waiting, handlers.named)

    def restore(self, origin: Origin) -> None:
        """Restore the state there. Raises UserError if a waiting message is missing or damaged."""
        self.waiting = WaitingMessages(self._folder, self.handlers.named, origin.waiting)
        self.downlink.restore(origin.streams, origin.acknowledged)

    def delivered(self, client: Id, request: Request) -> None:
        """Note that a client has received all of its request."""
        self.downlink.arrived(client, request.positions)
        for part in request.parts:
            self.waiting.delivered(part.handler, client)


class Requests:
    """The requests of one call: each message is packed once, when first sent, and dropped after its last reply.

    `messages`: by client; lazy messages for those that waited.
    """

    def __init__(
        self, outbox: Outbox, handler: Handler, messages: Mapping[Id, Any], asked: Sequence[Id], own: bool = False
    ) -> None:
        self.open: dict[Id, Request] = {}
        self._outbox = outbox
        self._frames: dict[Id, list[_Planned]] = {}
        for i in asked:
            waiting = [(to, lazy, None, True) for to, lazy in outbox.waiting.of(i) if to != handler]
            message = messages[i]
            own_pair = (message, None) if isinstance(message, LazyMessage) else (LazyMessage.of(message), message)
            self._frames[i] = [
                _Planned((waited, planned.key), planned, to, content, waited)
                for to, lazy, content, waited in [*waiting, (handler, *own_pair, False)]
                for planned in outbox.downlink.frames(to, lazy, i, own or waited)
            ]
        self._uses = Counter(planned.key for frames in self._frames.values() for planned in frames)
        self._packed: dict[Any, Packed] = {}

    def write(self, client: Id) -> Request:
        """Pack the client's request, and store its frames where their reader finds them."""
        outbox, parts = self._outbox, []
        for key, planned, handler, message, waited in self._frames[client]:
            if key not in self._packed:
                frame, counted, base, measured = planned.build()
                at = "" if frame is None else outbox.dispatcher.transport.put(frame)
                number = 0 if frame is None else outbox.dispatcher.next_number()
                self._packed[key] = Packed(
                    handler.name, waited, number, message, frame, counted, base, at, self._uses[key], planned.kind,
                    planned.position, measured,
                )  # fmt: skip
            parts.append(self._packed[key])
        self.open[client] = Request(parts)
        return self.open[client]

    def take(self, client: Id) -> Request:
        """Close and return the client's request, after its reply has arrived or been given up."""
        request = self.open.pop(client)
        for part, planned in zip(request.parts, self._frames[client], strict=True):
            part.left -= 1
            self._drop(planned.key)
        return request

    def close(self) -> None:
        """Drop the messages of clients that have not been asked yet."""
        open_now = Counter(planned.key for i in self.open for planned in self._frames[i])
        for key, part in list(self._packed.items()):
            part.left = open_now[key]
            self._drop(key)

    def _drop(self, key: Any) -> None:
        """Drop a message if no client has yet to answer it."""
        if self._packed[key].left == 0 and (at := self._packed.pop(key).at):
            self._outbox.dispatcher.transport.free(at)
