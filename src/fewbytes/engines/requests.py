"""What travels to clients with one call: each message packed once, and dropped with its last reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fewbytes.core.network import Handler
from fewbytes.core.problem import Id, Problem
from fewbytes.engines.handlers import Job, Part, packed
from fewbytes.wire import Base, Counted, Frame


@dataclass
class Packed:
    """One message as it travels, to however many clients."""

    handler: str
    waited: bool  # for this request, instead of having caused it
    number: int
    message: Any
    frame: Frame | None
    counted: Counted
    base: Base | None
    at: str
    left: int  # clients that have not answered yet

    @property
    def length(self) -> int:
        """Bytes of the frame."""
        return 0 if self.frame is None else len(self.frame)

    def part(self) -> Part:
        """What a job says of it."""
        return Part(self.handler, self.number, self.at, self.length)


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

    def fill(self, job: Job) -> None:
        """Say in a job which frames come with it."""
        job.waited = [part.part() for part in self.parts if part.waited]
        job.message = next((part.part() for part in self.parts if not part.waited and part.frame is not None), None)


class Sender(Protocol):
    """What requests need of an engine."""

    problem: Problem
    coded: bool

    def next_number(self) -> int:
        """A number no message of this run has had."""

    def waiting_for(self, client: Id) -> list[tuple[Handler, Any]]:
        """What waits for a client."""

    def put(self, frame: Frame) -> str:
        """Store a message's frame where its reader finds it; where that is."""

    def free(self, at: str) -> None:
        """Give the place back."""


class Requests:
    """The requests of one call: each message packed once, when it is first sent, and dropped with its last reply."""

    def __init__(
        self,
        engine: Sender,
        handler: Handler,
        messages: Mapping[Id, Any],
        asked: Sequence[Id],
    ) -> None:
        self.open: dict[Id, Request] = {}
        self._engine = engine
        self._messages = {
            i: [*((waited, message, True) for waited, message in engine.waiting_for(i) if waited != handler),
                (handler, messages[i], False)]
            for i in asked
        }  # fmt: skip
        self._uses = Counter(self._key(i, *each) for i, several in self._messages.items() for each in several)
        self._packed: dict[Any, Packed] = {}

    def _key(self, client: Id, handler: Handler, message: Any, waited: bool) -> Any:
        return handler.name, waited, id(message), self._engine.problem.architecture(client)

    def write(self, client: Id) -> Request:
        """The client's request, its messages packed and put where their reader finds them."""
        engine, parts = self._engine, []
        for handler, message, waited in self._messages[client]:
            key = self._key(client, handler, message, waited)
            if key not in self._packed:
                frame, counted = packed(handler, message, engine.problem.layout(client), engine.coded)
                at = "" if frame is None else engine.put(frame)
                base = None if frame is None else Base.of(frame.digest, message)
                number = 0 if frame is None else engine.next_number()
                self._packed[key] = Packed(
                    handler.name, waited, number, message, frame, counted, base, at, self._uses[key]
                )
            parts.append(self._packed[key])
        self.open[client] = Request(parts)
        return self.open[client]

    def take(self, client: Id) -> Request:
        """The client's request, once its reply is here (or will not come)."""
        request = self.open.pop(client)
        for part, each in zip(request.parts, self._messages[client], strict=True):
            part.left -= 1
            self._drop(self._key(client, *each))
        return request

    def close(self) -> None:
        """Of those who were to be asked nobody else will be."""
        open_now = Counter(self._key(i, *each) for i in self.open for each in self._messages[i])
        for key, part in list(self._packed.items()):
            part.left = open_now[key]
            self._drop(key)

    def _drop(self, key: Any) -> None:
        """Forget a message that nobody has to answer any more."""
        if self._packed[key].left == 0 and (at := self._packed.pop(key).at):
            self._engine.free(at)
