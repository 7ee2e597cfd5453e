"""The network over a Flower grid: payloads as messages, replies waited for, read with suspicion, released in order."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fewbytes.base.errors import FrameError, UserError, cleaned
from fewbytes.core.ledger import LeftOut
from fewbytes.core.method import Method
from fewbytes.core.metrics import MOST_SAMPLES, Scores, possible
from fewbytes.core.network import Handler
from fewbytes.core.policy import ABSENT, Policy, TooFewReplies
from fewbytes.core.problem import Id
from fewbytes.core.task import Task
from fewbytes.engines.base import Engine, Resumed
from fewbytes.engines.frames import FrameFolder
from fewbytes.engines.handlers import SCORE, Done, Job, SampleCounts
from fewbytes.engines.local import memory_bytes
from fewbytes.engines.requests import Request, Requests
from fewbytes.engines.store import ClientStore
from fewbytes.engines.underway import Work
from fewbytes.flower.messages import decoded, read_content, seal_of, sealed, write_content
from fewbytes.flower.node import DIFFERENT, Order, digest, in_common
from fewbytes.flower.private.errors import away
from fewbytes.flower.private.grid import connected_nodes, look_often
from fewbytes.running.settings import Settings
from fewbytes.wire import Frame

WINDOW = 8  # replies fetched before their turn; the others wait at Flower's SuperLink
HELLO_SECONDS = 30.0  # that a round waits for a node without a name to say who it is
AWAITED_SECONDS = 20.0  # after which people are told who is waited for
DONE_LIMIT = 1 << 16  # bytes of measurements beside a reply
CLOCKS = 3700.0  # seconds: clocks that are an hour apart, or set back or on by one, end no message


class _Answer(NamedTuple):
    """What came of asking a client: `outcome` is one of `fewbytes.core.network.OUTCOMES`; `frame` is the reply's.

    `different`: its node runs something else than the server. `elapsed`: seconds since it was asked, if known.
    """

    outcome: str
    why: str = ""
    done: Done = Done(0)
    frame: memoryview = memoryview(b"")
    different: bool = False
    elapsed: float | None = None


class _Sent(NamedTuple):
    """A message as Flower took it: its id, and the order in it."""

    id: str
    order: bytes


class _Coming(NamedTuple):
    """What a client was sent for a stream (None: it could not be), and until when its reply may come."""

    sent: _Sent | None
    deadline: float


@dataclass(frozen=True)
class _Question:
    """What a client is asked, and the frames of its messages one after another, unless they are handed over here."""

    order: Order
    frames: bytes = b""


@dataclass(frozen=True)
class Exchange:
    """How messages and replies are handed over.

    `poll`: seconds between looks for replies. `ahead`: clients asked at a time (default: all). `frame_folder`: where
    frames are handed over that need not travel. `stop`: ends the run as Ctrl-C does.
    """

    poll: float = 0.1
    ahead: int | None = None
    frame_folder: FrameFolder | None = None
    stop: threading.Event = field(default_factory=threading.Event)


class FlowerEngine(Engine):
    """Moves payloads as messages of a Flower grid. A context manager: entering it waits for the clients
    that are to take part from the start, or again.

    `settings.out`: the run folder, whose name is the run's on the nodes. `names`: as in `server_app`. `resumed`:
    what the run goes on with.
    """

    def __init__(
        self,
        grid: Grid,
        method: Method,
        task: Task,
        settings: Settings,
        policy: Policy,
        names: Sequence[str],
        exchange: Exchange,
        resumed: Resumed | None = None,
    ) -> None:
        folder = Path(settings.out or "")
        frames = folder / "frames" if settings.keep_frames else None
        super().__init__(
            method, task, policy, settings.coded, frames, resumed, settings.uplink(), settings.downlink(),
            waiting=folder / "checkpoint" / "waiting",
        )  # fmt: skip
        if names and len(names) != len(self.problem.clients):
            raise UserError(f"there are {len(names)} names of nodes for {len(self.problem.clients)} clients")
        self._folder = folder
        self.grid, self.run, self.names = grid, folder.resolve().name, list(names)
        self.poll, self.ahead, self._stop = exchange.poll, exchange.ahead, exchange.stop
        self.frame_folder = exchange.frame_folder
        self._watcher = settings.watcher
        self._new = resumed is None
        self._oldest: dict[Id, int] = {}  # version of each client's state that a kept checkpoint names
        self._nodes: dict[Id, int] = {}  # the node of each client that can be reached
        self._clients: dict[int, Id] = {}  # the client of each node without a name
        self._agreed: dict[Any, bytes] = {}
        self._coming: dict[Id, _Coming] = {}  # what was sent to clients that are at work for a stream, in that order
        self._early: dict[Id, Message] = {}  # replies of some of them that are here
        self._different = 0  # clients of this step whose nodes run something else
        self._pushed: dict[str, float] = {}  # when messages were sent, by Flower's ids
        self._looked: set[str] = set()  # to what there was no reply yet at the last look
        self._elapsed: dict[str, float] = {}  # seconds until replies came, where that is known
        self._call = 0
        self._cohort: tuple[set[Id], int] = (set(), 0)
        self._heard = False  # whether a client has answered yet
        self._unable: dict[Id, str] = {}  # clients that cannot take part as their nodes are, and why
        self._absent: tuple[int, list[LeftOut]] = 0, []  # a round, and who takes no part in it

    def __enter__(self) -> Self:
        look_often()
        wanted = set(self.clients)
        there = self._hear(self._connected(wanted))
        if (first := next(iter(self._unable), None)) is not None and len(there) < self._needed(wanted):
            raise UserError(f"{self.called(first)} cannot take part: {self._unable[first]}")
        if self._new:
            self.clients = there
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def _connected(self, wanted: set[Id]) -> list[Id]:
        """Those of the wanted clients that are connected, as soon as all are or connect_timeout is over.

        Raises TooFewReplies, and UserError for a node that says what cannot be, unless a round has begun.
        """
        deadline, starting, reported = time.monotonic() + self.policy.connect_timeout, not self.t, -1
        self._refresh(starting)
        while not wanted <= self._nodes.keys() and time.monotonic() < deadline:
            if len(wanted & self._nodes.keys()) != reported:
                reported = len(wanted & self._nodes.keys())
                self._watcher.waiting(reported, len(wanted))
            new = sorted(wanted & self._nodes.keys() - self._unable.keys())
            self._hear([i for i in new if i not in self.sample_counts])  # who has to mend something knows it at once
            self._wait(max(self.poll, 0.2))
            self._refresh(starting)
        there = sorted(wanted & self._nodes.keys())
        needed = self._needed(wanted)
        if len(there) < needed:
            raise TooFewReplies(
                f"{len(there)} of {len(wanted)} clients connected within {self.policy.connect_timeout:g} s, at least "
                f"{needed} must (--min-replies {self.policy.min_replies:g} of them); absent: "
                f"{', '.join(self.called(i) for i in sorted(wanted - set(there))[:5])}"
            )
        return there

    def _needed(self, wanted: set[Id]) -> int:
        """How many of the wanted clients must take part."""
        return math.ceil(self.policy.min_replies * len(wanted))

    def _hear(self, clients: Sequence[Id]) -> list[Id]:
        """Learn what clients hold whose data are not here, as far as their nodes say; those that can take part.

        Who cannot is told once for each reason, and asked again before the next round.
        """
        asked = [i for i in clients if i not in self.sample_counts and not len(self.task.data.clients[i].train)]
        able = [i for i in clients if i not in asked]
        for client, answer in self._ask("query.data", asked, lambda i: self._bare("data", i)):
            if answer.done.error or answer.different:
                self._pass_over(client, f"it {answer.why}" if answer.different else cleaned(answer.done.error, 1000))
                continue
            self._unable.pop(client, None)
            train, test = answer.done.sample_counts or (None, None)
            self.sample_counts[client] = self._counts(train), self._counts(test)
            if answer.done.spent is not None and (spent := answer.done.spent[0]) > 0:
                self._watcher.note(
                    f"earlier runs have spent epsilon {spent:.3g} of the samples of {self.called(client)}"
                )
            able.append(client)
        return sorted(able)

    def _pass_over(self, client: Id, why: str) -> None:
        if self._unable.get(client) != why:
            self._unable[client] = why
            self._watcher.refused(client, self._with_name(client, why))

    def _with_name(self, client: Id, why: str) -> str:
        return f"{self.names[client]}: {why}" if self.names else why

    def _counts(self, said: SampleCounts) -> SampleCounts:
        """What a node said, where it can be; the sum where the classes are not those that are known here."""
        counts = [said] if isinstance(said, int) else said
        if counts is None or not all(0 <= count < MOST_SAMPLES for count in counts):
            return None
        if isinstance(said, int) or said is None:
            return said
        return said if len(said) == len(self.task.data.groups or self.problem.classes) else sum(said)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        torch.set_num_threads(self._threads)

    def begin(self, t: int, scored: bool = True, *names: int | str) -> None:
        """Start a step; no cohort has been drawn for it."""
        super().begin(t, scored, *names)
        if t == self._absent[0] and not names:
            self.left_out = list(self._absent[1])
        self._call = self._different = 0
        self._cohort = (set(), 0)
        self.peak_memory_bytes = max(self.peak_memory_bytes, memory_bytes(os.getpid()))

    def arrivals(self, t: int) -> list[Id]:
        """Those of them whose nodes are connected and can take part; if nobody else is left they are waited for."""
        due = super().arrivals(t)
        if due and not self.clients:  # nobody is left to go on with, so they are waited for, as at the start
            there = self._connected(set(due))
        else:
            self._refresh()
            there = [i for i in due if i in self._nodes]
        able = self._hear(there)
        self._absent = t, [self._absence(i) for i in due if i not in able]
        return able

    def _absence(self, client: Id) -> LeftOut:
        if client in self._nodes and client in self._unable:
            return LeftOut(client, ABSENT, "rejected", self._with_name(client, self._unable[client]))
        return LeftOut(client, ABSENT, "unreachable", self._with_name(client, "its node is not connected"))

    def patient(self, tries: int) -> bool:
        """Wait for clients to come back: 1, 2, 4, … seconds, up to five minutes."""
        if tries > self.policy.retries:
            return False
        self._wait(min(2.0 ** (tries - 1), 300.0))
        self._refresh()
        return True

    def _make_states_durable(self, before: Mapping[Id, int]) -> None:
        """Nodes do before they answer, but for a simulation's, whose files are in the run folder."""
        if self.frame_folder is not None:
            ClientStore(self._folder / "checkpoint" / "clients").make_durable(self.versions.items() - before.items())

    def _keep_states(self, kept: Sequence[Mapping[Id, int]]) -> None:
        """Nodes may remove older states: the next requests say so."""
        self._oldest = {client: min(versions.get(client, 0) for versions in kept) for client in self.versions}

    def _drawn(self, fraction: float) -> list[Id]:
        if not self.policy.over_selection:
            return super()._drawn(fraction)
        count = max(1, round(fraction * len(self.clients)))
        chosen = super()._drawn(min(1.0, fraction * (1 + self.policy.over_selection)))
        self._cohort = (set(chosen), count)
        return chosen

    def _exchange(
        self, handler: Handler, asked: list[Id], messages: Mapping[Id, Any], own: bool
    ) -> Iterator[tuple[Id, Any]]:
        """As in `Engine`; one client's mistake does not stop the others."""
        requests = Requests(self, handler, messages, asked, own)
        self._call += 1
        cohort, count = self._cohort
        enough = count if set(asked) == cohort else len(asked)
        failed: list[LeftOut] = []
        shared: dict[int, bytes] = {}  # frames that go to several clients, by their message's number

        def question(client: Id) -> _Question:
            request, job = requests.write(client), self._job(handler.name, client)
            request.fill(job)
            travelling = [part for part in request.parts if part.frame is not None and not part.at]
            frames = []
            for part in travelling:
                frame = shared.get(part.number) or bytes(part.frame or b"")
                if part.left > 1:
                    shared[part.number] = frame
                frames.append(frame)
            return _Question(self._order(job, self._call), frames[0] if len(frames) == 1 else b"".join(frames))

        for client, answer in self._ask("train.handler", asked, question, enough):
            if answer.outcome == "answered":
                try:
                    value = self._accept(handler, client, requests.open[client], answer)
                    requests.take(client)
                except FrameError as error:
                    answer = answer._replace(outcome="rejected", why=cleaned(str(error)))
            if answer.outcome == "answered":
                yield client, value
                continue
            self._different += answer.different and client not in self._unable
            request = requests.take(client) if client in requests.open else None
            self.leave_out(handler.name, client, request, answer.outcome, answer.why, len(answer.frame))
            if answer.outcome != "surplus":
                failed.append(self.left_out[-1])
                self.enough(handler.name, len(asked), failed, enough)

    def _next(self, handler: Handler) -> tuple[Work, Any]:
        """Whose reply comes first; of those that come between two looks, and of what a node has kept since before the
        server stopped, who was asked first."""
        deadline = time.monotonic() + self.policy.round_timeout
        for work in self._at_work:
            if work.client not in self._coming:
                sent = self._send("train.handler", work.client, partial(self._of_work, work))
                self._coming[work.client] = _Coming(sent, deadline)
        client, answer = self._first_of_work()
        del self._coming[client]
        request = self._at_work.request(client)
        if answer.outcome == "answered":
            try:
                value = self._accept(handler, client, request, answer)
                return self._at_work.take(client)[0], value
            except FrameError as error:
                answer = answer._replace(outcome="rejected", why=cleaned(str(error)))
        self._different += answer.different and client not in self._unable
        work, _ = self._at_work.take(client)
        self.leave_out(handler.name, client, request, answer.outcome, answer.why, len(answer.frame))
        return work, self.left_out[-1]

    def _of_work(self, work: Work, client: Id) -> _Question:
        """The same whenever it is asked, so that a node that has done it answers with what it has kept."""
        version = self.versions.get(client, 0)
        rate = self.uplink.rate(client)
        job = Job(self.next_number(), work.handler, client, work.round, work.scored, version, rate=rate)
        request = self._at_work.request(client)
        request.fill(job)
        frames = [bytes(part.frame) for part in request.parts if part.frame is not None and not part.at]
        return _Question(self._order(job, call=0), b"".join(frames))

    def _first_of_work(self) -> tuple[Id, _Answer]:
        """What came of the first of those who are at work that has an end."""
        while True:
            for client, (sent, _) in self._coming.items():
                if sent is None:
                    return client, _Answer("unreachable", "its node is not connected")
                if client in self._early:
                    return client, self._answer(client, self._early.pop(client), sent.order)
            ids = {sent.id: client for client, (sent, _) in self._coming.items() if sent is not None}
            for looked in (list(ids)[start : start + WINDOW] for start in range(0, len(ids), WINDOW)):
                found, now = self._pull(looked), time.monotonic()
                self._early = {ids[number]: reply for number, reply in found.items()}
                for client in (ids[number] for number in looked if number not in found):
                    if now >= self._coming[client].deadline:
                        return client, _Answer("late", f"no reply within {self.policy.round_timeout:g} s")
                if found:
                    break
            else:
                self._wait(self.poll)

    def _given_up(self, clients: Sequence[Id]) -> None:
        """Their nodes may go on; what they reply is not looked for."""
        for client in clients:
            self._coming.pop(client, None)
            self._early.pop(client, None)

    def put(self, frame: Frame) -> str:
        """In a simulation's folder of frames."""
        return super().put(frame) if self.frame_folder is None else self.frame_folder.put(frame)

    def free(self, at: str) -> None:
        """Remove it there."""
        if self.frame_folder is not None:
            self.frame_folder.remove(at)

    def enough(self, handler: str, asked: int, failed: list[LeftOut], wanted: int | None = None) -> None:
        """As in `Engine`. Raises UserError where too few can answer as nodes run something else than the server, if no
        client has answered yet."""
        try:
            super().enough(handler, asked, failed, wanted)
        except TooFewReplies:
            if self._different < len(failed) or self._heard:
                raise
            raise UserError(f"{self.called(failed[0].client)} {failed[0].why}") from None

    def _accept(self, handler: Handler, client: Id, request: Request, answer: _Answer) -> Any:
        """The decoded reply, entered in the ledger. Raises FrameError for one that must not reach the method."""
        job_version, done = self.versions.get(client, 0), answer.done
        if done.version not in (job_version, job_version + 1):
            raise FrameError("header", f"it is of state version {done.version}, asked was version {job_version}")
        moving = None if answer.elapsed is None else answer.elapsed - done.seconds
        value = self.settle(handler, client, request, done, answer.frame, moving)
        self._heard = True
        return value

    def score_clients(self) -> dict[Id, Scores]:
        """Have the nodes score their clients' models."""
        if not self.method.has_local_models:
            return {}
        scores = {}
        self._call += 1
        for client, answer in self._ask("evaluate.score", self.clients, lambda i: self._bare(SCORE, i)):
            if answer.outcome != "answered":
                self.left_out.append(LeftOut(client, SCORE, answer.outcome, answer.why))
            else:
                scores[client] = possible(answer.done.scores, self.problem.objective.metrics)
        return scores

    def save_models(self, folder: Path, about: dict[str, Any]) -> None:
        """Have the nodes save them in their own folders."""
        if not self.method.has_local_models:
            return
        words = msgspec.json.encode(about)
        for _ in self._ask("query.save", self.ever(), lambda i: self._bare("save", i, words)):
            pass

    # ------------------------------------------------------------------------------------------ asking and waiting

    def _ask(
        self, kind: str, asked: Sequence[Id], question: Callable[[Id], _Question], enough: int | None = None
    ) -> Iterator[tuple[Id, _Answer]]:
        """Ask clients; yields what came of it in the order asked, one reply in memory (and WINDOW early ones).

        With `enough` fewer than those asked: the first so many to answer are taken, the others are surplus.
        """
        asked_at = time.monotonic()
        deadline, told = asked_at + self.policy.round_timeout, False
        choosing = enough is not None and enough < len(asked)
        ahead = len(asked) if self.ahead is None or choosing else self.ahead
        ids: dict[Id, _Sent | None] = {}  # what was sent to whom; None: it could not be
        early: dict[str, Message] = {}
        surplus = False
        for turn, client in enumerate(asked):
            for coming in asked[len(ids) : turn + ahead]:
                ids[coming] = self._send(kind, coming, question)
            if choosing and not turn:
                surplus = self._first(enough or 0, [sent.id for sent in ids.values() if sent], early, deadline)
            wanted = ids[client]
            if wanted is None:
                yield client, _Answer("unreachable", "its node is not connected")
                continue
            while wanted.id not in early and not surplus:
                coming_in = [s.id for c in asked[turn : len(ids)] if (s := ids[c]) and s.id not in early]
                early |= self._pull(coming_in[:WINDOW])
                if wanted.id in early or time.monotonic() >= deadline:
                    break
                if not told and time.monotonic() > asked_at + AWAITED_SECONDS:
                    told = True
                    pending = [c for c in asked[turn : len(ids)] if (s := ids[c]) and s.id not in early]
                    self._watcher.awaited([self.called(i) for i in pending])
                self._wait(self.poll)
            reply = early.pop(wanted.id, None)
            if reply is not None:
                yield client, self._answer(client, reply, wanted.order)
            elif surplus:
                yield client, _Answer("surplus", "others answered first")
            else:
                yield client, _Answer("late", f"no reply within {self.policy.round_timeout:g} s")

    def _first(self, enough: int, ids: Sequence[str], early: dict[str, Message], deadline: float) -> bool:
        """Collect replies until enough clients have answered; whether they have before the deadline."""
        while True:
            early |= self._pull([i for i in ids if i not in early])
            if sum(not reply.has_error() for reply in early.values()) >= enough:
                return True
            if len(early) == len(ids) or time.monotonic() >= deadline:
                return False
            self._wait(self.poll)

    def _send(self, kind: str, client: Id, question: Callable[[Id], _Question]) -> _Sent | None:
        if client not in self._nodes:
            return None
        asking = question(client)
        order = msgspec.msgpack.encode(asking.order)
        number = self._push(kind, self._nodes[client], write_content(order, asking.frames))
        return None if number is None else _Sent(number, order)

    def _push(self, kind: str, node: int, content: RecordDict) -> str | None:
        """Send a message; its id, or None if Flower does not take it."""
        ttl = self.policy.round_timeout + CLOCKS  # by Flower's clocks; who is late is told by ours, which never jumps
        message = Message(content, node, kind, ttl=ttl, group_id=str(self.t))
        pushed = time.monotonic()
        number = next(iter(self.grid.push_messages([message])), None)
        if number is not None:
            self._pushed[number] = pushed
        return number

    def _pull(self, ids: Sequence[str]) -> dict[str, Message]:
        """The replies that are there, by the ids of what they answer."""
        found = {m.metadata.reply_to_message_id: m for m in self.grid.pull_messages(ids)} if ids else {}
        now = time.monotonic()
        for number in found.keys() & self._looked:  # of what was not there at the last look it is known when it came
            self._elapsed[number] = now - self._pushed[number]
        self._looked = set(ids) - found.keys()
        return found

    def _wait(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise KeyboardInterrupt

    def _answer(self, client: Id, reply: Message, order: bytes) -> _Answer:
        """A client's reply to an order, read with suspicion."""
        if reply.has_error():
            if why := away(reply.error):
                return _Answer("unreachable", why)
            return _Answer("failed", f"Flower's error {reply.error.code}: {cleaned(reply.error.reason)}")
        try:
            text, frame = read_content(reply.content, self.frame_folder)
            if self.frame_folder is not None and "name" in reply.content.config_records["fewbytes"]:
                self.frame_folder.remove(str(reply.content.config_records["fewbytes"]["name"]))
            if len(text) > DONE_LIMIT:
                raise FrameError("length", f"{len(text)} bytes of measurements beside a reply")
            done = decoded(text, Done)
        except FrameError as error:
            return _Answer("rejected", cleaned(str(error)))
        if done.error.startswith(DIFFERENT):
            return _Answer("failed", self._difference(client, done.error.removeprefix(DIFFERENT)), different=True)
        if done.error:
            return _Answer("failed", cleaned(done.error), done, frame)
        if seal_of(reply.content) != sealed(order, text, frame):
            return _Answer("rejected", "it answers another order, of an earlier round or another run", done, frame)
        asked = reply.metadata.reply_to_message_id
        self._pushed.pop(asked, None)
        return _Answer("answered", "", done, frame, elapsed=self._elapsed.pop(asked, None))

    def _difference(self, client: Id, text: str) -> str:
        """What a node has else than this server, in one line."""
        ours, theirs = in_common(self.method, self.task, client), {}
        with suppress(msgspec.MsgspecError):
            theirs = msgspec.json.decode(text, type=dict[str, str])
        differing = [
            f"{cleaned(k)}: {cleaned(theirs.get(k, 'none'))} there, {ours.get(k, 'none')} here"
            for k in ours | theirs
            if theirs.get(k) != ours.get(k)
        ]
        return f"runs something else than this server: {'; '.join(differing)}"[:1000]

    def _job(self, handler: str, client: Id) -> Job:
        version = self.versions.get(client, 0)
        rate = self.uplink.rate(client)
        return Job(self.next_number(), handler, client, self.t, self.scored, version, rate=rate)

    def _bare(self, what: str, client: Id, frames: bytes = b"") -> _Question:
        """A question without messages."""
        return _Question(self._order(self._job(what, client), self._call), frames)

    def _order(self, job: Job, call: int) -> Order:
        key = self.problem.architecture(job.client)
        if key not in self._agreed:
            self._agreed[key] = digest(in_common(self.method, self.task, job.client))
        oldest = self._oldest.get(job.client, 0)
        return Order(self.run, self._agreed[key], job, call, oldest, self.coded, self.nonce)

    def called(self, client: Id) -> str:
        """By number and registered name."""
        return f"client {client} ({self.names[client]})" if self.names else super().called(client)

    def _refresh(self, starting: bool = False) -> None:
        """Learn which clients can be reached: by their nodes' registered names, or by asking nodes without one.

        Raises UserError for a node without a name that says what cannot be, if the run is `starting`; later on it is
        passed over.
        """
        nodes, strangers = {}, []
        for node, name in connected_nodes(self.grid).items():
            if self.names:
                if name in self.names:
                    nodes[self.names.index(name)] = node
            elif node in self._clients:
                nodes[self._clients[node]] = node
            else:
                strangers.append(node)
        ids = {self._push("query.hello", node, RecordDict({})): node for node in strangers}
        ids.pop(None, None)
        deadline = time.monotonic() + min(self.policy.connect_timeout, 600.0 if starting else HELLO_SECONDS)
        while ids and time.monotonic() < deadline:
            for number, reply in self._pull([i for i in ids if i is not None]).items():
                node = ids.pop(number)
                client = self._claimed(reply)
                wrong = client if isinstance(client, str) else ""
                if client in nodes:
                    wrong = f"two nodes say they hold client {client}: give each its own partition-id"
                if wrong and starting:
                    raise UserError(wrong)
                if not wrong:
                    nodes[int(client)] = node
                    self._clients[node] = int(client)
            if ids:
                self._wait(self.poll)
        self._nodes = nodes

    def _claimed(self, reply: Message) -> Id | str:
        """The client that a node says it holds, or what is wrong with that."""
        if reply.has_error():
            return f"a node does not start its app: {cleaned(reply.error.reason)}"
        try:
            client = decoded(read_content(reply.content)[0], int)
        except FrameError:
            return "a node does not run this package's app"
        if client not in self.problem.clients:
            last = len(self.problem.clients) - 1
            return f"a node says it holds client {client}, not one of 0 to {last}: set its partition-id"
        return client
