"""What every engine shares: the loop's side of a network, messages packed once, replies checked and entered in the
ledger, messages that wait, frames kept."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fewbytes.base.errors import FrameError, MethodError
from fewbytes.base.streams import stream
from fewbytes.core.ledger import Ledger, LeftOut, Row
from fewbytes.core.method import Method
from fewbytes.core.network import Handler, Network
from fewbytes.core.policy import Policy, TooFewReplies
from fewbytes.core.problem import Id, Task
from fewbytes.core.records import Gathered
from fewbytes.engines.handlers import Done, Job, Part, SampleCounts, packed, unchanged
from fewbytes.wire import Base, Counted, Frame, pack, unpack
from fewbytes.wire.fields import LIMIT, check_finite


@dataclass
class Waiting:
    """Messages to one handler that wait for their clients' next request, as a checkpoint holds them."""

    handler: str
    frames: list[bytes]
    of: list[int]  # which frame each of `clients` is to get
    clients: list[int]
    everybody: int | None  # which frame all others are to get who are not in `had`
    had: list[int]
    part: str  # of the network they are left in; empty: all of it
    members: list[int]  # who is in it


@dataclass
class Resumed:
    """What a run that goes on takes over from its checkpoint: client states' versions, and the clients that take
    part."""

    ledger: Ledger
    versions: dict[Id, int]
    known: list[Id]
    waiting: list[Waiting]


class Engine(ABC):
    """Runs a method's calls on clients; an engine adds how messages get to the clients and replies back.

    `policy`: how many must answer. `coded`: lossless coding of the frames. `frames`: a folder that every frame is kept
    in. `resumed`: what is taken over from a checkpoint.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        policy: Policy,
        coded: bool = True,
        frames: Path | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        self.method, self.task, self.problem = method, task, task.problem
        self.policy, self.coded = policy, coded
        self.network = Network(self)
        """What the method's server half is given."""
        self.clients: list[Id] = self.problem.clients_in(1) if resumed is None else list(resumed.known)
        """The clients the run knows and that have not left, in ascending order."""
        self.ledger = Ledger() if resumed is None else resumed.ledger
        self.versions: dict[Id, int] = {} if resumed is None else dict(resumed.versions)
        """The version of each client's state, as of its last accepted reply."""
        self.records = Gathered()
        """What handlers measured for people since the round began."""
        self.shown: dict[str, bytes] = {}
        """What the method showed people since the round began: files of the run's gallery by name."""
        self.left_out: list[LeftOut] = []
        """Whose replies took no part since the round began."""
        self.notes: dict[str, str] = {}
        """What the method noted since the round began, and how much of it."""
        self.not_finite: set[str] = set()
        """The handlers of which a reply since the round began held numbers that are not finite."""
        self.t = 0
        self.rng: np.random.Generator = stream(self.problem.seed, "server", 0)
        self.scored = True
        self.on_reply: Callable[[Id], None] = lambda client: None
        """Called after every exchange (for a progress display)."""
        self.sample_counts: dict[Id, tuple[SampleCounts, SampleCounts]] = {}
        """What nodes say of their clients' training and test samples, where those are not here."""
        self.peak_memory_bytes = 0
        self._frames = frames
        self._numbers = 0
        self._handlers: dict[str, Handler] = {}
        self._open: str | None = None
        self._cohorts: dict[float, list[Id]] = {}
        self._parts: dict[str, list[Id]] = {}
        self._waiting: dict[tuple[str, str], _Unsent] = {}  # by handler and part of the network
        for waiting in () if resumed is None else resumed.waiting:
            self._waiting[waiting.handler, waiting.part] = self._unpacked(waiting)

    # ---------------------------------------------------------------------------------------------- the loop's side

    def begin(self, t: int, scored: bool = True, *names: int | str) -> None:
        """Start round t (0: before the first) or the step of it that `names` name: named randomness, no records."""
        self.t, self.scored, self.records, self.shown = t, scored, Gathered(), {}
        self.left_out, self.notes, self.not_finite, self._cohorts = [], {}, set(), {}
        self.rng = stream(self.problem.seed, "server", t, *names)

    def idle(self) -> None:
        """Raises MethodError if a call was left unread or half-read."""
        if self._open is not None:
            raise MethodError(
                f"the call of {self._open!r} was not read to its end before the next step: its clients run as their "
                "replies are read"
            )

    def abandon(self) -> None:
        """Forget a call that ended in an error."""
        self._open = None

    def deliver(self) -> None:
        """Send all that waits, by itself."""
        for (name, _), left in list(self._waiting.items()):
            messages = {i: left.message(i) for i in self.clients if left.is_for(i)}
            if messages:
                for _ in self.exchange(getattr(self.method, name), messages, None):
                    pass
        self._waiting = {}

    def waiting(self) -> list[Waiting]:
        """The messages that wait, for a checkpoint."""
        return [self._packed(name, part, left) for (name, part), left in self._waiting.items()]

    def arrivals(self, t: int) -> list[Id]:
        """Clients that are there for round t and can be reached, but are not known to the run yet, ascending."""
        return [i for i in self.problem.clients_in(t) if i not in self.clients]

    def ever(self) -> list[Id]:
        """The clients that take part or did before they left, in ascending order."""
        return sorted({*self.clients, *self.versions})

    @abstractmethod
    def checkpointed(self) -> None:
        """The run can go on from the states of `versions`: older ones may go."""

    @abstractmethod
    def score_clients(self) -> dict[Id, tuple[int, int]]:
        """(correct, samples) of every client's own model on its test split; empty if the method has none."""

    @abstractmethod
    def save_models(self, folder: Path, about: dict[str, Any]) -> None:
        """Save every client's own model, if the method has one, as `client-<i>.safetensors`, where the client is."""

    # ------------------------------------------------------------------------------------------- the network's side

    def sample(self, fraction: float) -> list[Id]:
        """The round's cohort; see `Network.sample`."""
        if fraction not in self._cohorts:
            self._cohorts[fraction] = self._drawn(fraction)
        return self._cohorts[fraction]

    def _drawn(self, fraction: float) -> list[Id]:
        if not 0 < fraction <= 1:
            raise MethodError(f"a cohort is a fraction in (0, 1] of the clients, got {fraction}")
        count = max(1, round(fraction * len(self.clients)))
        if count == len(self.clients):
            return list(self.clients)
        return sorted(int(i) for i in self.rng.choice(self.clients, count, replace=False))

    def exchange(
        self, function: Callable[..., Any], to: Iterable[Id] | Mapping[Id, Any], send: Any
    ) -> Iterator[tuple[Id, Any]]:
        """Run a handler on clients; see `Network.call`."""
        self.idle()
        asked = [i for i in to if i in self.clients or not self._has_left(i)]
        if len(set(asked)) != len(asked):
            raise MethodError("a client is asked twice in one call")
        unknown = [i for i in asked if i not in self.clients]
        if unknown:
            raise MethodError(f"unknown clients are asked: {unknown[:5]}")
        messages: Mapping[Id, Any] = to if isinstance(to, Mapping) else dict.fromkeys(asked, send)
        handler = self._handler(function)
        self._open = handler.name  # from now on, so that a call nobody reads is an error, too
        return self._read(handler, asked, messages)

    def set_part(self, part: str, members: Sequence[Id]) -> None:
        """Who is in a part of the network; see `Network.among`."""
        self._parts[part] = list(members)
        for (_, where), left in self._waiting.items():
            if where == part:
                left.members = list(members)

    def leave(self, function: Callable[..., Any], to: Mapping[Id, Any] | None, send: Any, part: str) -> None:
        """Leave messages with clients' next requests; see `Network.tell`."""
        handler = self._handler(function)
        if handler.reply is not None:
            raise MethodError(f"handler {handler.name!r} replies, so it cannot be left with a next request: call it")
        waiting = self._waiting.pop((handler.name, part), _Unsent())
        left = _Unsent(everybody=send) if to is None else waiting
        left.members = self._parts.get(part)
        left.own |= {} if to is None else {i: message for i, message in to.items() if message is not None}
        left.guard()
        self._waiting[handler.name, part] = left  # in the order of the last messages, in which their handlers run

    def show(self, file: str, made: Callable[[], bytes]) -> None:
        """Keep a file for people, in rounds that are scored."""
        if self.scored:
            self.shown[file] = made()

    def note(self, what: str, how_much: str) -> None:
        """See `Network.note`."""
        self.notes[what] = how_much

    def _has_left(self, client: Id) -> bool:
        last = self.problem.present[client][1] if client in self.problem.clients else None
        return last is not None and last < self.t

    def _handler(self, function: Callable[..., Any]) -> Handler:
        owner = getattr(function, "__self__", None)
        if owner is not self.method and owner is not getattr(self.method, "inner", None):
            raise MethodError(f"{function!r} is not a handler of the method that runs: call self.<handler>")
        name = function.__name__
        if name not in self._handlers:
            self._handlers[name] = Handler.of(function)
        return self._handlers[name]

    def _read(self, handler: Handler, asked: list[Id], messages: Mapping[Id, Any]) -> Iterator[tuple[Id, Any]]:
        for client, reply in self._exchange(handler, asked, messages):
            self.on_reply(client)
            yield client, reply
        self._open = None

    @abstractmethod
    def _exchange(self, handler: Handler, asked: list[Id], messages: Mapping[Id, Any]) -> Iterator[tuple[Id, Any]]:
        """Send, run, collect; enter each exchange in the ledger; yield replies in the order asked."""

    # -------------------------------------------------------------------------------------------- for engines' own use

    def next_number(self) -> int:
        """A number no job or message of this run has had."""
        self._numbers += 1
        return self._numbers

    def waiting_for(self, client: Id) -> list[tuple[Handler, Any]]:
        """What waits for a client, in the order its handlers are to run."""
        for left in self._waiting.values():
            unchanged(*left.bases.values())
        waiting = [(name, left.message(client)) for (name, _), left in self._waiting.items() if left.is_for(client)]
        return [(self._handler(getattr(self.method, name)), message) for name, message in waiting]

    def settle(
        self, handler: Handler, client: Id, sent: Request, done: Done, reply: memoryview, limit: int = LIMIT
    ) -> Any:
        """The decoded reply; its exchange is entered in the ledger. Raises FrameError, entering nothing, for one that
        must not reach the method: damaged, with more than `limit` bytes of arrays, or with numbers that are not finite.
        """
        value = None
        unchanged(*(part.base for part in sent.parts))
        if handler.reply is not None:
            value = unpack(handler.reply, reply, layout=self.problem.layout(client), base=sent.base, limit=limit)
            try:
                check_finite(value)
            except FrameError:
                self.not_finite.add(handler.name)
                raise
        self.keep(client, handler.name, "up", reply)
        self.versions[client] = done.version
        self.records.add(client, done.records)
        for part in sent.parts:
            for (name, _), left in self._waiting.items():
                if name == part.handler:
                    left.delivered(client)
        row = Row(self.t, handler.name, client, sent.length, len(reply), sent.counted, Counted(*done.up))
        self.ledger.add(row)
        return value

    def leave_out(self, handler: str, client: Id, sent: Request | None, outcome: str, why: str, length: int) -> None:
        """Enter an exchange that did not end with a valid reply; `length`: bytes that came all the same."""
        self.left_out.append(LeftOut(client, handler, outcome, why))
        down, counts = (0, Counted()) if sent is None else (sent.length, sent.counted)
        self.ledger.add(Row(self.t, handler, client, down, length, counts, Counted(), outcome))

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

    def _packed(self, name: str, part: str, left: _Unsent) -> Waiting:
        messages = {id(message): message for message in (*left.own.values(), left.everybody) if message is not None}
        frames = [bytes(pack(message, coded=False)) for message in messages.values()]
        at = {key: i for i, key in enumerate(messages)}
        of = [at.get(id(message), -1) for message in left.own.values()]
        everybody = None if left.everybody is None else at[id(left.everybody)]
        members = [] if left.members is None else left.members
        return Waiting(name, frames, of, list(left.own), everybody, sorted(left.had), part, members)

    def _unpacked(self, waiting: Waiting) -> _Unsent:
        kind = self._handler(getattr(self.method, waiting.handler)).message
        messages = [unpack(kind, frame, limit=1 << 40) for frame in waiting.frames] if kind is not None else []
        own = {i: messages[at] if at >= 0 else None for i, at in zip(waiting.clients, waiting.of, strict=True)}
        everybody = None if waiting.everybody is None else messages[waiting.everybody]
        left = _Unsent(own, everybody, set(waiting.had), waiting.members if waiting.part else None)
        left.guard()
        return left


@dataclass
class _Unsent:
    """Messages to one handler that wait: to some clients their own, and one to everybody else who has not had it."""

    own: dict[Id, Any] = field(default_factory=dict)
    everybody: Any = None
    had: set[Id] = field(default_factory=set)
    members: list[Id] | None = None  # whom it can be for; None: anybody
    bases: dict[int, Base] = field(default_factory=dict)

    def guard(self) -> None:
        """Note the messages' tensors as they are, so that a change in place is an error."""
        messages = {id(message): message for message in (*self.own.values(), self.everybody) if message is not None}
        known = self.bases
        self.bases = {key: known.get(key) or Base.of(b"", message) for key, message in messages.items()}

    def is_for(self, client: Id) -> bool:
        there = self.members is None or client in self.members
        return client in self.own or (self.everybody is not None and there and client not in self.had)

    def message(self, client: Id) -> Any:
        return self.own.get(client, self.everybody)

    def delivered(self, client: Id) -> None:
        self.own.pop(client, None)
        self.had.add(client)


@dataclass
class Packed:
    """One message as it travels, to however many clients."""

    handler: str
    waited: bool  # for this request, instead of having caused it
    number: int
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


class Requests:
    """The requests of one call: each message packed once, when it is first sent, and dropped with its last reply.

    `put` stores a frame where its reader finds it and `free` gives the place back.
    """

    def __init__(
        self,
        engine: Engine,
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
                self._packed[key] = Packed(handler.name, waited, number, frame, counted, base, at, self._uses[key])
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
