"""What every engine shares: the loop's side of a network, replies checked and entered in the ledger, frames kept."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fewbytes.base.errors import FrameError, MethodError
from fewbytes.base.files import private_folder, replacing
from fewbytes.base.rate import ALL, Rate
from fewbytes.base.streams import stream
from fewbytes.core.admission import GROWTH, Known, admit, finite_norm, norm
from fewbytes.core.devices import prepare_device
from fewbytes.core.gallery import check_name
from fewbytes.core.ledger import Ledger, LeftOut, Row
from fewbytes.core.means import Means
from fewbytes.core.method import Method
from fewbytes.core.metrics import Scores
from fewbytes.core.network import Handler, Network, Shown
from fewbytes.core.policy import Policy, TooFewReplies
from fewbytes.core.privacy import Bytes, ClientPrivacy
from fewbytes.core.problem import Id
from fewbytes.core.records import Gathered, Records
from fewbytes.core.rules import Rule
from fewbytes.core.standing import Updates
from fewbytes.core.task import Task
from fewbytes.core.uplink import Uplink
from fewbytes.engines.blame import Blame
from fewbytes.engines.downlink import Downlink, Heard, Letter, Line
from fewbytes.engines.handlers import UP_BITS, Done, SampleCounts, unchanged
from fewbytes.engines.requests import Request, Requests
from fewbytes.engines.underway import AtWork, UnderWay, Work
from fewbytes.engines.waiting import Waiting, WaitingMessages
from fewbytes.wire import Counted, Frame, counted, unpack
from fewbytes.wire.schema import leaves_of

SHORTEST = 1e-3  # seconds that an exchange takes to move, where clocks say less
MARGIN = 64 << 20  # bytes of arrays a reply may hold beyond sixteen times the model


@dataclass
class Resumed:
    """What a run that goes on takes over from its checkpoint: client states' versions, and the clients that take
    part; the run's nonce, and how often it has been gone on with; who is at work, and the simulated time; what rounded
    messages were last, and which clients hold."""

    nonce: bytes
    starts: int
    versions: dict[Id, int]
    known: list[Id]
    waiting: list[Waiting]
    under_way: UnderWay
    clock: float
    lines: list[Line]
    heard: dict[Id, Heard]


class Named(NamedTuple):
    """The files that a checkpoint names: client states, by their versions, and messages that wait, by number."""

    versions: Mapping[Id, int]
    messages: Collection[int]


class Engine(ABC):
    """Runs a method's calls on clients; an engine adds how messages get to the clients and replies back.

    `policy`: how many must answer. `coded`: lossless coding of the frames. `frames`: a folder that every frame is kept
    in. `resumed`: what is taken over from a checkpoint. `uplink`, `downlink`: how much is kept of the values in
    replies, and in messages. `waiting`: the folder of messages that wait for clients' next requests.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        policy: Policy,
        coded: bool = True,
        frames: Path | None = None,
        resumed: Resumed | None = None,
        uplink: Uplink | None = None,
        downlink: Rate = ALL,
        *,
        waiting: Path,
    ) -> None:
        self.method, self.task, self.problem = method, task, task.problem
        prepare_device(self.problem.device, self.problem.precision)
        self.policy, self.coded, self.uplink = policy, coded, uplink or Uplink()
        self.network = Network(self)
        """What the method's server half is given."""
        self.clients = self.problem.clients_in(1) if resumed is None else list(resumed.known)
        self.ledger = Ledger()
        """Every exchange of the run; the loop gives that of a run that goes on."""
        self.versions: dict[Id, int] = {} if resumed is None else dict(resumed.versions)
        """The version of each client's state, as of its last accepted reply."""
        self.records = Gathered(self.problem.objective.metrics)
        """What handlers measured for people since the round began."""
        self.shown: dict[str, bytes] = {}
        """What the method showed people since the round began: files of the run's gallery by name."""
        self.left_out: list[LeftOut] = []
        """Whose replies took no part since the round began."""
        self.notes: dict[str, str] = {}
        """What the method noted since the round began, and how much of it."""
        self.not_finite: set[str] = set()
        """The handlers of which a reply since the round began held numbers that are not finite."""
        self._values = sum(value.numel() for value in task.problem.first_state(0).values())
        self.updates = Updates(self._values)
        """What the replies since the round began add to what clients were sent."""
        self.rule = Rule()
        """What the server takes of clients' replies where it takes a mean; the loop says it."""
        self.privacy: ClientPrivacy | None = None
        """What the run promises its clients, if the server keeps it; the loop says it."""
        self.released = 0
        """How many noisy means there were since the round began."""
        self._asked = 0
        self.staleness: list[int] = []
        """Of the replies of a stream since the round began: how many rounds before each was asked for."""
        self.clock = 0.0 if resumed is None else resumed.clock
        """Simulated seconds since the run began, where clients' speeds are simulated."""
        self.t = 0
        self.rng: np.random.Generator = stream(self.problem.seed, "server", 0)
        self.scored = True
        self.not_asked: dict[Id, str] = dict.fromkeys(policy.excluded, "by the operator's wish (exclude)")
        """Clients that are passed over, and why."""
        self.blame = Blame(task.problem)
        """Whose replies broke the step that is taken."""
        self.on_reply: Callable[[Id], None] = lambda client: None
        """Called after every exchange (for a progress display)."""
        self.sample_counts: dict[Id, tuple[SampleCounts, SampleCounts]] = {}
        """What nodes say of their clients' training and test samples, where those are not here."""
        self.peak_memory_bytes = 0
        self._frames = frames
        self.nonce = os.urandom(16) if resumed is None else resumed.nonce
        """What tells the run from all others that have its name."""
        self._numbers = 0 if resumed is None else resumed.starts << 40  # above all that have been used
        self._handlers: dict[str, Handler] = {}
        self._open: str | None = None
        self._check: Callable[[Id, Any], None] | None = None  # of the open call's replies
        self._replies: Iterator[tuple[Id, Any]] = iter(())  # of the open call
        self._bounded: dict[Any, tuple[float, int]] = {}
        self._cohorts: dict[float, list[Id]] = {}
        self._left_in = waiting
        self._waiting = WaitingMessages(waiting, self._named, [] if resumed is None else resumed.waiting)
        self._at_work = AtWork()
        self._resumed_work = None if resumed is None else resumed.under_way  # until a step begins
        self._had: set[Id] = set()  # whose part in this round's stream is over
        self.downlink = Downlink(downlink, task.problem, coded)
        if resumed is not None:
            self.downlink.go_back(resumed.lines, resumed.heard)

    # ---------------------------------------------------------------------------------------------- the loop's side

    @property
    def clients(self) -> list[Id]:
        """The clients the run knows and that have not left, in ascending order."""
        return self._ascending

    @clients.setter
    def clients(self, clients: list[Id]) -> None:
        self._ascending, self._present = clients, frozenset(clients)

    def begin(self, t: int, scored: bool = True, *names: int | str) -> None:
        """Start round t (0: before the first) or the step of it that `names` name: named randomness, no records."""
        self.t, self.scored, self.records, self.shown = t, scored, Gathered(self.problem.objective.metrics), {}
        self.left_out, self.notes, self.not_finite, self._cohorts = [], {}, set(), {}
        self.staleness, self._had = [], set()
        self.blame.begin()
        self.downlink.begin()
        self.updates = Updates(self._values)
        self.released = 0
        self.rng = stream(self.problem.seed, "server", t, *names)
        if self._resumed_work is not None:
            self._at_work.unpack(self._resumed_work, self, self._named)
            self._resumed_work = None

    def idle(self) -> None:
        """Raises MethodError if a call was left unread or half-read."""
        if self._open is not None:
            self.blame.failed = True  # no client's reply does that
            raise MethodError(
                f"the call of {self._open!r} was not read to its end before the next step: its clients run as their "
                "replies are read"
            )

    def abandon(self) -> None:
        """Forget a call that ended in an error; what is still on its way is received."""
        with suppress(Exception):
            for _ in self._replies:
                pass
        self._open, self.blame.last = None, None

    def blamed(self, error: Exception) -> list[Id]:
        """Whose replies made the method's server half raise `error`; what is still on its way is received."""
        last, failed = self.blame.last, self.blame.failed
        self.abandon()  # before it is told who is to blame: by then all replies have been looked at
        return [] if failed else self.blame.of(error, last)

    def fresh(self) -> None:
        """A new step begins, of which nobody's reply has broken anything yet."""
        self.blame.fresh()
        for client, rounds in self.ledger.refused_in_a_row().items():
            if rounds >= self.policy.strikes:
                self.not_asked.setdefault(client, f"{rounds} refused replies in a row")

    def go_back(self, to: Resumed | None) -> None:
        """Forget what a step that is taken again has done to clients since a checkpoint (None: since the start)."""
        self._given_up([work.client for work in self._at_work])
        self._at_work.clear()
        self.versions, self.clock = ({}, 0.0) if to is None else (dict(to.versions), to.clock)
        self._waiting = WaitingMessages(self._left_in, self._named, [] if to is None else to.waiting)
        self.downlink.go_back([] if to is None else to.lines, {} if to is None else to.heard)
        if to is not None:
            self._at_work.unpack(to.under_way, self, self._named)

    def patient(self, tries: int) -> bool:
        """Wait before a round that too few answered is tried again, the `tries`-th time; False: that will not help."""
        return False

    def deliver(self) -> None:
        """Send all that waits, by itself, to those who answer: no round is to come for which the others must know."""
        for name in self._waiting.handlers():
            with suppress(TooFewReplies):
                for _ in self.exchange(self._function(name), self._waiting.to(name, self.clients), None):
                    pass
            self.abandon()
        self._waiting.clear()

    def waiting(self) -> list[Waiting]:
        """The messages that wait, for a checkpoint."""
        return self._waiting.packed()

    def under_way(self) -> UnderWay:
        """Who is at work for a stream, for a checkpoint."""
        return self._at_work.packed()

    def give_up(self) -> None:
        """Nobody who is at work for a stream is waited for any more: no round is to come for the replies."""
        self._give_up({work.client: "still at work when the last round ended" for work in self._at_work}, "surplus")

    def _give_up(self, clients: Mapping[Id, str], outcome: str) -> None:
        self._given_up(list(clients))
        for client, why in clients.items():
            work, request = self._at_work.take(client)
            self.leave_out(work.handler, client, request, outcome, why, 0)

    def arrivals(self, t: int) -> list[Id]:
        """Clients that are there for round t and can be reached, but are not known to the run yet, ascending."""
        return [i for i in self.problem.clients_in(t) if i not in self._present]

    def ever(self) -> list[Id]:
        """The clients that take part or did before they left, in ascending order."""
        return sorted({*self.clients, *self.versions})

    def make_durable(self, before: Named | None) -> None:
        """Have what a checkpoint is about to name survive a loss of power; what the last one named (None: nothing)
        does."""
        before = before or Named({}, frozenset())
        self._waiting.make_durable(before.messages)
        self._make_states_durable(before.versions)

    def checkpointed(self, kept: Sequence[Named]) -> None:
        """The run can go on from what each kept checkpoint names: other files may go."""
        self._waiting.keep_only({number for named in kept for number in named.messages})
        self._keep_states([named.versions for named in kept])

    @abstractmethod
    def _make_states_durable(self, before: Mapping[Id, int]) -> None:
        """Have the states of `versions` survive a loss of power; those of `before` do."""

    @abstractmethod
    def _keep_states(self, kept: Sequence[Mapping[Id, int]]) -> None:
        """Of client states none but these versions are needed, one for each kept checkpoint."""

    @abstractmethod
    def score_clients(self) -> dict[Id, Scores]:
        """The metrics of every client's own model on its test split; empty if the method has none."""

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
        self,
        function: Callable[..., Any],
        to: Iterable[Id] | Mapping[Id, Any],
        send: Any,
        part: str = "",
        check: Callable[[Id, Any], None] | None = None,
    ) -> Iterator[tuple[Id, Any]]:
        """Run a handler on clients; see `Network.call`."""
        self._may_ask()
        asked = [i for i in to if i in self._present or not self._has_left(i)]
        if len(set(asked)) != len(asked):
            raise MethodError("a client is asked twice in one call")
        unknown = [i for i in asked if i not in self._present]
        if unknown:
            raise MethodError(f"unknown clients are asked: {unknown[:5]}")
        if busy := [i for i in asked if i in self._at_work]:
            raise MethodError(f"clients are asked that are at work for a stream: {busy[:5]}")
        own = isinstance(to, Mapping)
        messages: Mapping[Id, Any] = to if isinstance(to, Mapping) else dict.fromkeys(asked, send)
        handler = self._handler(function)
        self._asked = len(asked)
        self.updates.call += 1
        self._open, self._check = handler.name, check  # from now on, so that a call nobody reads is an error, too
        if not own and self.downlink.rounds(handler, type(send)):
            able = [i for i in asked if i not in self.not_asked and i not in self.blame.barred]
            self.downlink.to_all(handler, send, able, part)
        self._replies = self._read(handler, asked, messages, own)
        return self._replies

    def _may_ask(self) -> None:
        self.idle()
        if self.released:
            raise MethodError("nothing is sent after a noisy mean before the round is kept: what is done again counts")

    def stream(self, function: Callable[..., Any], send: Any, at_once: int) -> Iterator[tuple[Id, Any, int]]:
        """Keep clients at work on a handler; see `Network.stream`."""
        self._may_ask()
        handler, self._check = self._handler(function), None
        if not self.method.promises.streams:
            raise MethodError(
                f"{type(self.method).__name__} streams {handler.name!r}, and must say so: Promises(streams=True)"
            )
        if self.privacy is not None:
            raise MethodError("a noisy mean is of a cohort that is asked together, not of a stream: call it")
        if at_once < 1:
            raise MethodError(f"a stream keeps at least one client at work, not {at_once}")
        if self._waiting.handlers():
            raise MethodError("messages wait for clients' next requests, which a stream does not carry: call them")
        if other := next((work.handler for work in self._at_work if work.handler != handler.name), None):
            raise MethodError(f"clients are still at work on {other!r}: a run streams one handler")
        return self._stream(handler, send, at_once)

    @property
    def means(self) -> Means:
        """What the run takes of states that clients send."""
        return Means(self.rule, self.privacy, self._refused, self._release)

    def _refused(self) -> int:
        return len({left.client for left in self.left_out if left.outcome in ("rejected", "excluded")})

    def _release(self) -> tuple[int, Bytes]:
        """A mean is seen by nobody before its round's checkpoint, which counts it, is written;
        so one that is drawn anew, by a run that was stopped before, counts once. Raises MethodError for a second."""
        if self.privacy is None or self.released:
            raise MethodError("a round has one noisy mean, as more would spend more than is promised")
        self.released += 1
        return self._asked, self.privacy.random(self.t)

    def set_part(self, part: str, members: Sequence[Id]) -> None:
        """Who is in a part of the network; see `Network.among`."""
        self._waiting.set_part(part, members)

    def leave(self, function: Callable[..., Any], to: Mapping[Id, Any] | None, send: Any, part: str) -> None:
        """Leave messages with clients' next requests; see `Network.tell`."""
        self._waiting.leave(self._handler(function), to, send, part)

    def show(self, name: str, what: Shown) -> None:
        """See `Network.show`; in rounds that are scored, if there is something to see."""
        check_name(name)
        if self.scored and (file := what.drawn()):
            self.shown[f"{name}.{what.ending}"] = file

    def note(self, what: str, how_much: str) -> None:
        """See `Network.note`."""
        self.notes[what] = how_much

    def _has_left(self, client: Id) -> bool:
        last = self.problem.present[client][1] if client in self.problem.clients else None
        return last is not None and last < self.t

    def _handler(self, function: Callable[..., Any]) -> Handler:
        owner = getattr(function, "__self__", None)
        if not any(owner is each for each in self.method.runs()):
            raise MethodError(f"{function!r} is not a handler of the method that runs: call self.<handler>")
        name = function.__name__
        if name not in self._handlers:
            self._handlers[name] = Handler.of(function)
        return self._handlers[name]

    def _named(self, name: str) -> Handler:
        return self._handler(self._function(name))

    def _function(self, handler: str) -> Callable[..., Any]:
        owner = next(each for each in self.method.runs() if hasattr(each, handler))
        function: Callable[..., Any] = getattr(owner, handler)
        return function

    def _read(
        self, handler: Handler, asked: list[Id], messages: Mapping[Id, Any], own: bool
    ) -> Iterator[tuple[Id, Any]]:
        for client in asked:
            if client in self.not_asked:
                self.leave_out(handler.name, client, None, "excluded", self.not_asked[client], 0)
        asked = [i for i in asked if i not in self.not_asked]
        barred = [i for i in asked if i in self.blame.barred]
        for client in barred:
            self.leave_out(handler.name, client, None, "rejected", self.blame.barred[client], 0)
        try:
            if barred:
                self.enough(handler.name, len(asked), self.left_out[-len(barred) :])
            able = [i for i in asked if i not in self.blame.barred]
            for client, reply in self._exchange(handler, able, messages, own):
                self.blame.read(handler, client, reply)
                self.on_reply(client)
                yield client, reply
        except Exception:  # not the method's: what that raises does not come by here
            self.blame.failed, self.blame.last, self._open = True, None, None
            raise
        self._open, self.blame.last = None, None

    def _stream(self, handler: Handler, send: Any, at_once: int) -> Iterator[tuple[Id, Any, int]]:
        for why, outcome in ((self.not_asked, "excluded"), (self.blame.barred, "rejected")):
            for client in sorted(why.keys() & self._present - self._had):
                self._had.add(client)
                if client in self._at_work:
                    self._give_up({client: why[client]}, outcome)
                else:
                    self.leave_out(handler.name, client, None, outcome, why[client], 0)
        gone = {work.client: "it has left" for work in self._at_work if work.client not in self._present}
        self._give_up(gone, "surplus")
        able = [i for i in self.clients if i not in self.not_asked]
        failed = [left for left in self.left_out if left.client in self.blame.barred]
        rng = stream(self.problem.seed, "server", self.t, "stream")
        requests = Requests(self, handler, dict.fromkeys(able, send), able)
        try:
            self._enough_of(handler, able, failed, at_once)
            while True:
                free = [i for i in able if i not in self._at_work and i not in self._had]
                places = min(at_once - len(self._at_work), len(free))
                for client in sorted(map(int, rng.choice(free, places, replace=False))) if places > 0 else ():
                    until = self.clock + self.takes(client)
                    self._at_work.add(Work(client, handler.name, self.t, self.scored, until, 0), requests)
                if not len(self._at_work):
                    return
                work, reply = self._next(handler)
                self._had.add(work.client)
                if isinstance(reply, LeftOut):
                    failed.append(reply)
                    self._enough_of(handler, able, failed, at_once)
                    continue
                self.staleness.append(self.t - work.round)
                self.blame.read(handler, work.client, reply)
                self.on_reply(work.client)
                yield work.client, reply, self.staleness[-1]
        except Exception:  # not the method's, as in `_read`
            self.blame.failed = True
            raise
        finally:  # also where the method has had enough
            self.blame.last = None
            requests.close()

    def _enough_of(self, handler: Handler, able: Sequence[Id], failed: list[LeftOut], at_once: int) -> None:
        if failed:
            self.enough(handler.name, len(able), failed, min(at_once, len(able)))

    @abstractmethod
    def _next(self, handler: Handler) -> tuple[Work, Any]:
        """Wait for one of those who are at work, and enter its exchange in the ledger: what it was at work on, and its
        reply, or how it was left out."""

    @abstractmethod
    def _given_up(self, clients: Sequence[Id]) -> None:
        """The replies of these clients, who are at work, are not waited for any more."""

    def takes(self, client: Id) -> float:
        """Simulated seconds that a client takes for an exchange, where its speed is simulated."""
        return 0.0

    @abstractmethod
    def _exchange(
        self, handler: Handler, asked: list[Id], messages: Mapping[Id, Any], own: bool
    ) -> Iterator[tuple[Id, Any]]:
        """Send, run, collect; enter each exchange in the ledger; yield replies in the order asked. `own`: messages are
        clients' own, not one for all."""

    # -------------------------------------------------------------------------------------------- for engines' own use

    def put(self, frame: Frame) -> str:
        """Store a message's frame where its readers find it, if it does not travel with the request."""
        return ""

    def free(self, at: str) -> None:
        """Nobody reads what `put` stored there any more."""

    def next_number(self) -> int:
        """A number no job or message of this run has had."""
        self._numbers += 1
        return self._numbers

    def waiting_for(self, client: Id) -> list[tuple[Handler, Letter]]:
        """What waits for a client, in the order its handlers are to run."""
        return self._waiting.of(client)

    def settle(
        self, handler: Handler, client: Id, sent: Request, done: Done, reply: memoryview, moving: float | None = None
    ) -> Any:
        """The decoded reply; its exchange, which moved for so many seconds (None: that is not known), is entered in the
        ledger. Raises FrameError, entering nothing, for one that must not reach the method: damaged, far larger than
        the model, with numbers that are not finite, or that the client may not send."""
        value = None
        unchanged(*(part.base for part in sent.parts))
        if handler.reply is not None:
            most, limit = self._bounds(client)
            value = unpack(handler.reply, reply, layout=self.problem.layout(client), base=sent.base, limit=limit)
            leaves = leaves_of(value)
            try:
                size = finite_norm(leaves, self.problem.objective.perhaps)
            except FrameError:
                self.not_finite.add(handler.name)
                raise
            message = next((part.message for part in sent.parts if not part.waited), None)
            tensors = {} if sent.base is None else sent.base.tensors
            layout, statistics = self.problem.layout(client), self.problem.statistics(client)
            held, norms = (self.samples_of(client), self._classes(client)), (most / self.policy.max_norm, most)
            growth = math.inf if self.problem.objective.any_scale else max(GROWTH, self.policy.max_norm / GROWTH)
            known = Known(layout, statistics, message, tensors, *held, *norms, growth, self.method.promises.hides)
            admit(leaves, size, known)
            if self._check is not None:
                try:
                    self._check(client, value)
                except MethodError as error:
                    raise FrameError("values", str(error)) from None
            self.updates.add(handler.name, client, layout, message, value)
        self._keep_sent(handler.name, client, sent)
        self.keep(client, handler.name, "up", reply)
        self.versions[client] = done.version
        self.downlink.arrived(client, sent.stands)
        self.records.add(client, done.records)
        self.records.add(client, Records(measures=sent.measured))
        for part in sent.parts:
            self._waiting.delivered(part.handler, client)
        row = Row(self.t, handler.name, client, sent.length, len(reply), sent.counted, counted(value))
        self.ledger.add(row)
        moved = sent.length + len(reply)
        self.uplink.saw(client, done.seconds, done.rounded, None if moving is None else moved / max(moving, SHORTEST))
        if self.uplink.picks and client in (picked := self.records.measures.get(UP_BITS, {})):
            ends = dict.fromkeys(f"{end:.2g}" for end in (min(picked.values()), max(picked.values())))
            self.note("clients sent what their links move while they train", f"{' to '.join(ends)} bits a value")
        return value

    def samples_of(self, client: Id) -> int | None:
        """How many samples a client has to train on, as far as that is known."""
        said = self.sample_counts.get(client, (None, None))[0]
        if said is None:
            return len(self.task.data.clients[client].train) or None
        return said if isinstance(said, int) else sum(said)

    def _classes(self, client: Id) -> list[int] | None:
        """How many of them are of each class, as far as that is known."""
        said = self.sample_counts.get(client, (None, None))[0]
        data = self.task.data
        if said is None and data.groups is None and len(data.clients[client].train):
            said = data.label_counts()["train"][client]
        return said if isinstance(said, list) else None

    def _bounds(self, client: Id) -> tuple[float, int]:
        """What a client's replies may be of: norm, and bytes of arrays."""
        key = self.problem.architecture(client)
        if key not in self._bounded:
            first = self.problem.first_state(client)
            size = sum(value.nbytes for value in first.values())
            self._bounded[key] = self.policy.max_norm * max(1.0, norm(first.values())), 16 * size + MARGIN
        return self._bounded[key]

    def leave_out(self, handler: str, client: Id, sent: Request | None, outcome: str, why: str, length: int) -> None:
        """Enter an exchange that did not end with a valid reply; `length`: bytes that came all the same."""
        self.left_out.append(LeftOut(client, handler, outcome, why))
        down, counts = (0, Counted()) if sent is None else (sent.length, sent.counted)
        self._keep_sent(handler, client, sent)
        self.ledger.add(Row(self.t, handler, client, down, length, counts, Counted(), outcome))

    def enough(self, handler: str, asked: int, failed: list[LeftOut], wanted: int | None = None) -> None:
        """Raises TooFewReplies if with these `failed` of those asked too few of `wanted` (default: all) can answer."""
        needed, left = math.ceil(self.policy.min_replies * (asked if wanted is None else wanted)), asked - len(failed)
        if left < needed:
            first, others = failed[0], [self.called(each.client) for each in failed[1:]]
            also = f", and {', '.join(others[:9])}{' …' if others[9:] else ''} too" if others else ""
            raise TooFewReplies(
                f"round {self.t}, handler {handler!r}: only {left} of {asked} clients can still answer, {needed} must "
                f"(--min-replies {self.policy.min_replies:g} of them); {self.called(first.client)} {first.outcome}: "
                f"{first.why}{also}; the run can be resumed"
            )

    def called(self, client: Id) -> str:
        """A client as people know it."""
        return f"client {client}"

    def _keep_sent(self, handler: str, client: Id, sent: Request | None) -> None:
        for n, part in enumerate(() if sent is None else sent.parts):
            beside = part.handler if part.waited else f"missed-{n}" if part.kind == "missed" else ""
            self.keep(client, f"{handler}.{beside}" if beside else handler, "down", part.frame)

    def keep(self, client: Id, handler: str, way: str, frame: memoryview | Frame | None) -> None:
        """Keep a frame as a file, if asked to."""
        if self._frames is not None and frame is not None and len(frame):
            private_folder(self._frames)
            with replacing(self._frames / f"{self.t}-{handler}-{client}-{way}.frame") as file:
                file.write(bytes(frame))
