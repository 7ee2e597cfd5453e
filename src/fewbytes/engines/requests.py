"""What travels to clients with one call: each message packed once, and dropped with its last reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from fewbytes.core.network import Handler
from fewbytes.core.problem import Id
from fewbytes.engines.downlink import Downlink, Heard, Leg, Letter, Stand
from fewbytes.engines.handlers import Job, Kind, Part
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
    stand: Stand | None  # where a client is that has it
    measured: dict[str, float]  # by rounding
    _whole: bytes | None = None  # the frame in one piece, while others are to be sent it, too

    @property
    def length(self) -> int:
        """Bytes of the frame."""
        return 0 if self.frame is None else len(self.frame)

    def whole(self) -> bytes:
        """The frame in one piece."""
        made = self._whole if self._whole is not None else bytes(self.frame or b"")
        self._whole = made if self.left > 1 else None
        return made

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
    def stands(self) -> Heard:
        """Where a client is once it has all of it."""
        return {part.handler: part.stand for part in self.parts if part.stand is not None}

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


class _Leg(NamedTuple):
    """One frame of a client's request, by what all that are equal have in common."""

    key: Hashable
    leg: Leg
    handler: Handler
    message: Any  # None if it waited
    waited: bool


class Sender(Protocol):
    """What requests need of an engine."""

    downlink: Downlink

    def next_number(self) -> int:
        """A number no message of this run has had."""

    def waiting_for(self, client: Id) -> list[tuple[Handler, Letter]]:
        """What waits for a client."""

    def put(self, frame: Frame) -> str:
        """Store a message's frame where its reader finds it; where that is."""

    def free(self, at: str) -> None:
        """Give the place back."""


class Requests:
    """The requests of one call: each message packed once, when it is first sent, and dropped with its last reply.

    `messages`: by client, or, of what waited, letters.
    """

    def __init__(
        self, engine: Sender, handler: Handler, messages: Mapping[Id, Any], asked: Sequence[Id], own: bool = False
    ) -> None:
        self.open: dict[Id, Request] = {}
        self._engine = engine
        self._legs: dict[Id, list[_Leg]] = {}
        for i in asked:
            waiting = [(to, letter, None, True) for to, letter in engine.waiting_for(i) if to != handler]
            message = messages[i]
            called = (message, None) if isinstance(message, Letter) else (Letter.of(message), message)
            self._legs[i] = [
                _Leg((waited, leg.key), leg, to, held, waited)
                for to, letter, held, waited in [*waiting, (handler, *called, False)]
                for leg in engine.downlink.legs(to, letter, i, own or waited)
            ]
        self._uses = Counter(leg.key for legs in self._legs.values() for leg in legs)
        self._packed: dict[Any, Packed] = {}

    def write(self, client: Id) -> Request:
        """The client's request, its messages packed and put where their reader finds them."""
        engine, parts = self._engine, []
        for key, leg, handler, message, waited in self._legs[client]:
            if key not in self._packed:
                frame, counted, base, measured = leg.made()
                at = "" if frame is None else engine.put(frame)
                number = 0 if frame is None else engine.next_number()
                self._packed[key] = Packed(
                    handler.name, waited, number, message, frame, counted, base, at, self._uses[key], leg.kind,
                    leg.stand, measured,
                )  # fmt: skip
            parts.append(self._packed[key])
        self.open[client] = Request(parts)
        return self.open[client]

    def take(self, client: Id) -> Request:
        """The client's request, once its reply is here (or will not come)."""
        request = self.open.pop(client)
        for part, leg in zip(request.parts, self._legs[client], strict=True):
            part.left -= 1
            self._drop(leg.key)
        return request

    def close(self) -> None:
        """Of those who were to be asked nobody else will be."""
        open_now = Counter(leg.key for i in self.open for leg in self._legs[i])
        for key, part in list(self._packed.items()):
            part.left = open_now[key]
            self._drop(key)

    def _drop(self, key: Any) -> None:
        """Forget a message that nobody has to answer any more."""
        if self._packed[key].left == 0 and (at := self._packed.pop(key).at):
            self._engine.free(at)
