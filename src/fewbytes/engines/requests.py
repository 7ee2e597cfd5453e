"""What travels to clients with one call: each message packed once, and dropped with its last reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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

    def keep(self, client: Id, handler: str, way: str, frame: memoryview | Frame | None) -> None:
        """Keep a frame as a file, if asked to."""


class Requests:
    """The requests of one call: each message packed once, when it is first sent, and dropped with its last reply.

    `put` stores a frame where its reader finds it and `free` gives the place back.
    """

    def __init__(
        self,
        engine: Sender,
        handler: Handler,
        messages: Mapping[Id, Any],
        asked: Sequence[Id],
        put: Callable[[Frame], str] = lambda frame: "",
        free: Callable[[str], None] = lambda at: None,
    ) -> None:
        self.open: dict[Id, Request] = {}
        self._engine, self._put, self._free = engine, put, free
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
                at = "" if frame is None else self._put(frame)
                base = None if frame is None else Base.of(frame.digest, message)
                number = 0 if frame is None else engine.next_number()
                self._packed[key] = Packed(
                    handler.name, waited, number, message, frame, counted, base, at, self._uses[key]
                )
            parts.append(self._packed[key])
            call = self._messages[client][-1][0].name
            engine.keep(client, f"{call}.{handler.name}" if waited else call, "down", parts[-1].frame)
        self.open[client] = Request(parts)
        return self.open[client]

    def take(self, client: Id) -> Request:
        """The client's request, once its reply is here (or will not come)."""
        request = self.open.pop(client)
        for part, each in zip(request.parts, self._messages[client], strict=True):
            part.left -= 1
            if part.left == 0:
                del self._packed[self._key(client, *each)]
                if part.at:
                    self._free(part.at)
        return request
