"""What every engine's network shares: messages packed once, replies checked and entered in the ledger, frames kept."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbytes.base.errors import FrameError
from fewbytes.core.ledger import Ledger, LeftOut, Row
from fewbytes.core.method import Method
from fewbytes.core.network import Handler, Network
from fewbytes.core.policy import Policy, TooFewReplies
from fewbytes.core.problem import Id, Task
from fewbytes.engines.handlers import Done, packed, unchanged
from fewbytes.wire import Base, Counted, Frame, unpack
from fewbytes.wire.fields import LIMIT, check_finite


class EngineNetwork(Network):
    """A network that packs, counts and keeps frames; an engine adds how they get to the clients and back.

    `policy`: how many must answer. `coded`: lossless coding of the frames. `versions`: each client's state's version,
    as the server knows it. `known`: the clients that take part (default: all that are there from the start). `frames`:
    a folder that every frame is kept in.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        policy: Policy,
        *,
        coded: bool = True,
        ledger: Ledger | None = None,
        versions: dict[Id, int] | None = None,
        known: list[Id] | None = None,
        frames: Path | None = None,
    ) -> None:
        super().__init__(method, task, ledger)
        if known is not None:
            self.clients = list(known)
        self.policy, self.coded = policy, coded
        self.versions: dict[Id, int] = dict(versions or {})
        self._frames = frames
        self._numbers = 0

    def ever(self) -> list[Id]:
        """The clients that take part or did before they left, in ascending order."""
        return sorted({*self.clients, *self.versions})

    def number(self) -> int:
        """A number no job or message of this run has had."""
        self._numbers += 1
        return self._numbers

    def settle(
        self,
        handler: Handler,
        client: Id,
        letter: Letter,
        done: Done,
        reply: memoryview,
        limit: int = LIMIT,
    ) -> Any:
        """The decoded reply; its exchange is entered in the ledger. Raises FrameError, entering nothing, for one that
        must not reach the method: damaged, with more than `limit` bytes of arrays, or with numbers that are not finite.
        """
        value = None
        if handler.reply is not None:
            unchanged(letter.base)
            value = unpack(handler.reply, reply, layout=self.task.layout(client), base=letter.base, limit=limit)
            try:
                check_finite(value)
            except FrameError:
                self.not_finite.add(handler.name)
                raise
        self.keep(client, handler.name, "up", reply)
        self.versions[client] = done.version
        self.records.add(client, done.records)
        row = Row(self.t, handler.name, client, letter.length, len(reply), letter.counted, Counted(*done.up))
        self.ledger.add(row)
        return value

    def leave_out(self, handler: str, client: Id, letter: Letter | None, outcome: str, why: str, length: int) -> None:
        """Enter an exchange that did not end with a valid reply; `length`: bytes that came all the same."""
        self.left_out.append(LeftOut(client, handler, outcome, why))
        down, sent = (0, Counted()) if letter is None else (letter.length, letter.counted)
        self.ledger.add(Row(self.t, handler, client, down, length, sent, Counted(), outcome))

    def enough(self, handler: str, asked: int, failed: list[LeftOut], wanted: int | None = None) -> None:
        """Raises TooFewReplies if with these `failed` of those asked too few of `wanted` (default: all) can answer."""
        needed, left = math.ceil(self.policy.min_replies * (asked if wanted is None else wanted)), asked - len(failed)
        if left < needed:
            first = failed[0]
            raise TooFewReplies(
                f"round {self.t}, handler {handler!r}: only {left} of {asked} clients can still answer, {needed} are "
                f"needed (min_replies = {self.policy.min_replies:g}); {self.called(first.client)} {first.outcome}: "
                f"{first.why}; the run can be resumed"
            )

    def called(self, client: Id) -> str:
        """A client as people know it."""
        return f"client {client}"

    def keep(self, client: Id, handler: str, way: str, frame: memoryview | Frame | None) -> None:
        """Keep a frame as a file, if asked to."""
        if self._frames is not None and frame is not None and len(frame):
            self._frames.mkdir(parents=True, exist_ok=True)
            (self._frames / f"{self.t}-{handler}-{client}-{way}.frame").write_bytes(bytes(frame))


@dataclass
class Letter:
    """One message as it travels, to however many clients."""

    number: int
    frame: Frame | None
    length: int
    counted: Counted
    base: Base | None
    at: str
    left: int  # clients that have not answered yet


class Mail:
    """The messages of one call: each packed once, when it is first sent, and dropped with its last reply.

    `put` stores a frame where its reader finds it and `free` gives the place back.
    """

    def __init__(
        self,
        net: EngineNetwork,
        handler: Handler,
        messages: Mapping[Id, Any],
        asked: list[Id],
        put: Callable[[Frame], str] = lambda frame: "",
        free: Callable[[str], None] = lambda at: None,
    ) -> None:
        self.letters: dict[Id, Letter] = {}
        self._net, self._handler, self._messages = net, handler, messages
        self._put, self._free = put, free
        self._key = {i: (id(messages[i]), net.task.architecture(i)) for i in asked}
        self._uses = Counter(self._key.values())
        self._packed: dict[Any, Letter] = {}

    def write(self, client: Id) -> Letter:
        """The client's message, packed and put where its reader finds it."""
        key, message = self._key[client], self._messages[client]
        if key not in self._packed:
            net = self._net
            frame, counted = packed(self._handler, message, net.task.layout(client), net.coded)
            at = "" if frame is None else self._put(frame)
            base = None if frame is None or self._handler.reply is None else Base.of(frame.digest, message)
            number, length = (0, 0) if frame is None else (net.number(), len(frame))
            self._packed[key] = Letter(number, frame, length, counted, base, at, self._uses[key])
        self.letters[client] = self._packed[key]
        self._net.keep(client, self._handler.name, "down", self.letters[client].frame)
        return self.letters[client]

    def take(self, client: Id) -> Letter:
        """The client's message, once its reply is here (or will not come)."""
        letter = self.letters.pop(client)
        letter.left -= 1
        if letter.left == 0:
            del self._packed[self._key[client]]
            if letter.at:
                self._free(letter.at)
        return letter
