"""What travels to clients: numbered, rounded to what they hold, packed once, and dropped with its last reply."""

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
    """One message as it travels, to however many clients."""

    handler: str
    waited: bool  # for this request, instead of having caused it
    number: int
    message: Any  # None if it waited
    frame: Frame | None
    counted: Counted
    base: Base | None
    at: str
    left: int  # clients that have not answered yet
    kind: Kind  # as in `Part`
    position: Position | None  # where a client is that has it
    measured: dict[str, float]  # by rounding
    _whole: bytes | None = None  # the frame in one piece, while others are to be sent it, too

    @property
    def length(self) -> int:
        """Bytes of the frame."""
        return 0 if self.frame is None else len(self.frame)

    def whole(self) -> bytes:
        """The frame in one piece."""
        whole = self._whole if self._whole is not None else bytes(self.frame or b"")
        self._whole = whole if self.left > 1 else None
        return whole

    def part(self) -> Part:
        """What a job says of it."""
        return Part(self.handler, self.number, self.at, self.length, self.kind)


@dataclass
class Request:
    """What travels to a client with one request: what waited for it, then the call's own message."""

    parts: list[Packed]

    @property
    def length(self) -> int:
        """Bytes of all frames."""
        return sum(part.length for part in self.parts)

    @property
    def counted(self) -> Counted:
        """What papers count for all of it."""
        return sum((part.counted for part in self.parts), Counted())

    @property
    def base(self) -> Base | None:
        """What the reply is coded against."""
        return Base.together([part.base for part in self.parts if part.base is not None])

    @property
    def message(self) -> Any:
        """The call's own message."""
        return next((part.message for part in self.parts if not part.waited), None)

    @property
    def positions(self) -> Acknowledged:
        """Where a client is once it has all of it."""
        return {part.handler: part.position for part in self.parts if part.position is not None}

    @property
    def measured(self) -> dict[str, float]:
        """What rounding measured of it."""
        return {name: value for part in self.parts for name, value in part.measured.items()}

    def fill(self, job: Job) -> list[bytes]:
        """Say in a job which frames come with it; those that are not stored elsewhere."""
        own = [part.part() for part in self.parts if not part.waited and part.frame is not None]
        job.waited = [part.part() for part in self.parts if part.waited]
        job.missed, job.message = own[:-1], own[-1] if own else None
        return [part.whole() for part in self.parts if part.frame is not None and not part.at]


class _Planned(NamedTuple):
    """One frame of a client's request, by what all that are equal have in common."""

    key: Hashable
    planned: MessageFrame
    handler: Handler
    message: Any  # None if it waited
    waited: bool


class Outbox:
    """Makes the requests of a run, which knows what clients hold and what waits for them."""

    def __init__(self, terms: Terms, handlers: Handlers, dispatcher: Dispatcher) -> None:
        self.handlers, self.dispatcher, self._folder = handlers, dispatcher, terms.waiting
        self.downlink = Downlink(terms.downlink, terms.task.problem, terms.coded)
        self.waiting = WaitingMessages(terms.waiting, handlers.named)

    def restore(self, origin: Origin) -> None:
        """Stand as the run stood there. Raises UserError if a message that waits is gone or damaged."""
        self.waiting = WaitingMessages(self._folder, self.handlers.named, origin.waiting)
        self.downlink.restore(origin.streams, origin.acknowledged)

    def delivered(self, client: Id, request: Request) -> None:
        """A client has had all of its request."""
        self.downlink.arrived(client, request.positions)
        for part in request.parts:
            self.waiting.delivered(part.handler, client)


class Requests:
    """The requests of one call: each message packed once, when it is first sent, and dropped with its last reply.

    `messages`: by client, or, of what waited, lazy messages.
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
            called = (message, None) if isinstance(message, LazyMessage) else (LazyMessage.of(message), message)
            self._frames[i] = [
                _Planned((waited, planned.key), planned, to, held, waited)
                for to, lazy, held, waited in [*waiting, (handler, *called, False)]
                for planned in outbox.downlink.frames(to, lazy, i, own or waited)
            ]
        self._uses = Counter(planned.key for frames in self._frames.values() for planned in frames)
        self._packed: dict[Any, Packed] = {}

    def write(self, client: Id) -> Request:
        """The client's request, its messages packed and put where their reader finds them."""
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
        """The client's request, once its reply is here (or will not come)."""
        request = self.open.pop(client)
        for part, planned in zip(request.parts, self._frames[client], strict=True):
            part.left -= 1
            self._drop(planned.key)
        return request

    def close(self) -> None:
        """Of those who were to be asked nobody else will be."""
        open_now = Counter(planned.key for i in self.open for planned in self._frames[i])
        for key, part in list(self._packed.items()):
            part.left = open_now[key]
            self._drop(key)

    def _drop(self, key: Any) -> None:
        """Forget a message that nobody has to answer any more."""
        if self._packed[key].left == 0 and (at := self._packed.pop(key).at):
            self._outbox.dispatcher.transport.free(at)
