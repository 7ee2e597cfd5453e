"""Runs one client handler, for every engine: state and message in, state, reply and measurements out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal

import msgspec
from torch import Tensor

from fewbytes.base.errors import MethodError, UserError, returned, with_article
from fewbytes.base.rate import Rate
from fewbytes.base.state import State
from fewbytes.base.streams import seed_all, untouched
from fewbytes.codec.delta import Received, followed, serialised
from fewbytes.core.devices import open_device, prepare_device
from fewbytes.core.method import Method, check_model, check_state
from fewbytes.core.metrics import Scores
from fewbytes.core.network import Handler
from fewbytes.core.privacy import Diary
from fewbytes.core.problem import Id
from fewbytes.core.records import Records
from fewbytes.core.site import Given, Shared, Site
from fewbytes.core.task import Task
from fewbytes.engines.firsts import Firsts
from fewbytes.engines.saving import FileSaves
from fewbytes.engines.store import ClientStore
from fewbytes.models.files import save_model
from fewbytes.wire import (
    Base,
    Counted,
    Frame,
    Layout,
    Lossy,
    base_of,
    counted,
    pack,
    pack_state,
    payload,
    unpack,
    unpack_state,
)
from fewbytes.wire.frame import digest_of

SCORE, SAVE = ":score", ":save"  # the engine's own handlers, besides the method's
UP_BITS, UP_ERROR = "uplink bits a value", "uplink rounding error"  # of a rounded reply; squared error / squared norm
DOWN_BITS, DOWN_ERROR = "downlink bits a value", "downlink rounding error"  # of a rounded message


SampleCounts = list[int] | int | None
"""The sample counts of a client's split, as its node reports them: by class, in total, or None."""


@payload
class Kept:
    """A client's stored state when frames are rounded. `state`: the method's state as a frame (empty: none). `lost`:
    the accumulated rounding error of its replies, by field and name. `heard`: the last rounded message by handler, as
    an uncoded frame."""

    state: bytes
    lost: dict[str, dict[str, Tensor]]
    heard: dict[str, bytes]


Kind = Literal["", "first", "next", "origin"]


class Part(msgspec.Struct, array_like=True):
    """A message sent with a job: its handler, its number, and its frame's place and length.

    `kind`, in a delta stream: `first`, a full message; `next`, a difference from the message that the client has;
    `origin`, the stream's first message, to which the next frame is a difference. Empty: not in a delta stream.
    """

    handler: str
    number: int
    at: str
    length: int
    kind: Kind = ""


class Job(msgspec.Struct, array_like=True):
    """One handler to run on one client."""

    number: int
    handler: str
    client: Id
    round: int
    scored: bool
    version: int  # of the client's state; 0: none yet
    waited: list[Part] = []  # messages that waited for this request; their handlers run first
    origin: Part | None = None  # an earlier message, which only the message's frame refers to
    message: Part | None = None  # the message to answer; None: nothing was sent
    reply_to: str = ""  # where a long reply may be written
    rate: Rate = Rate()  # how finely the reply is rounded
    steps: int | None = None  # of local training; 0: the method's own; None: as 0, and they are not reported
    save_every: float = 0.0  # seconds between saves of local training; 0: it is not saved

    @property
    def parts(self) -> list[Part]:
        """All messages, in the order of their frames."""
        return [*self.waited, *(part for part in (self.origin, self.message) if part is not None)]


class Done(msgspec.Struct, array_like=True):
    """The result of a job. The reply's frame is `reply`, or the first `length` bytes at the job's `reply_to`."""

    number: int
    version: int = 0
    reply: bytes = b""
    length: int = 0
    records: Records = msgspec.field(default_factory=Records)
    scores: Scores = {}  # of the client's own model
    error: str = ""
    trace: str = ""
    public: str = ""  # the error text that a server may see
    sample_counts: tuple[SampleCounts, SampleCounts] | None = None  # of a client's training and test split
    seconds: float = 0.0  # duration of the job
    rounded: int = 0  # number of the reply's rounded values
    first: bytes = b""  # digest of the weights that the client's model starts from, where the server needs it
    spent: tuple[float, float | None] | None = None  # epsilon spent by other runs, and the limit for all runs
    declined: bool = False  # whether `error` is a refusal by the site's policy
    versions: dict[str, str] = {}  # of the node's software, where they differ from the server's
    validation: Scores = {}  # as `scores`, on the client's validation data; of a handler, of the model that it received


class Handlers:
    """A method's client handlers, each inspected once."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._read = {each.name: each for each in method.handlers()}

    def of(self, function: Callable[..., Any]) -> Handler:
        """The handler of a function. Raises MethodError if it is not one of the running method's."""
        owner = getattr(function, "__self__", None)
        if not any(owner is each for each in self._method.runs()):
            raise MethodError(f"{function!r} is not a handler of the method that runs: call self.<handler>")
        name = function.__name__
        if name not in self._read:
            self._read[name] = Handler.of(function)
        return self._read[name]

    def named(self, name: str) -> Handler:
        """The handler of that name. Raises MethodError if there is none."""
        if name not in self._read:
            raise MethodError(f"{type(self._method).__name__} has no handler {name!r}")
        return self._read[name]

    def function(self, name: str) -> Callable[..., Any]:
        """The method's bound function of that name."""
        owner = next(each for each in self._method.runs() if hasattr(each, name))
        function: Callable[..., Any] = getattr(owner, name)
        return function


class Runner:
    """Runs handlers of one method on one task, with client states in a store. `diary`: records the privacy that clients
    spend (default: the store)."""

    def __init__(self, method: Method, task: Task, store: ClientStore, coded: bool, diary: Diary | None = None) -> None:
        self.method, self.task, self.store, self.coded = method, task, store, coded
        self._shared = Shared(store if diary is None else diary)
        self.check: Callable[[Id, Any], None] = lambda client, message: None
        """Called with each message before its use; raises an error for an unacceptable message."""
        self.leaving: Callable[[Any], None] = lambda reply: None
        """Called with each reply before it is packed."""
        prepare_device(task.problem.device, task.problem.precision)
        self.state_class = method.state_class("client")
        if task.problem.privacy is not None:
            task.problem.privacy.prepare({len(client.train) for client in task.data.clients} - {0})
        self._handlers, self.firsts = Handlers(method), Firsts(task.problem)
        self._messages: dict[int, Received] = {}  # of the last job, by number: the next job may have the same ones

    def run(self, job: Job, frames: Sequence[memoryview]) -> tuple[Done, Frame | None]:
        """Run one job, and store the new state. `frames`: those of the job's messages."""
        started = time.monotonic()
        open_device(self.task.problem.device)
        layout = self.task.problem.layout(job.client)
        state, lost, retained = self._state(job)
        done = Done(job.number, version=job.version)
        if job.handler == SCORE:
            site = self._site(job, SCORE, done)
            model = self.method.local_model(state, site)
            check_model(self.method, "local_model", model)
            if model is not None and (len(site.test) or len(site.validation)):
                model = site.finished(model)
                done.scores = site.scores(model) if len(site.test) else {}
                done.validation = site.validated(model)
            return done, None
        received = self._received(job, frames, layout, retained)
        for each in received.values():
            self.check(job.client, each.message)
        for part in job.waited:
            site = self._site(job, part.handler, done)
            self.method.handle(part.handler, state, received[part.number].message, site)
        handler = self._handlers.named(job.handler)
        message = None if job.message is None else received[job.message.number].message
        site = self._site(job, handler.name, done)
        reply = self.method.handle(handler.name, state, message, site)
        done.validation = site.received
        bases = [each.base for each in received.values()]
        unchanged(*bases)
        frame: Frame | None = None
        if handler.reply is not None:
            if type(reply) is not handler.reply:
                raise MethodError(f"it must reply {with_article(handler.reply)}, it replied {returned(reply)}")
            self.leaving(reply)
            statistics = self.task.problem.statistics(job.client)
            lossy = lossy_for(job.rate, statistics, lost, averaged=True) if job.rate else None
            frame = pack(reply, layout=layout, base=Base.together(bases), coded=self.coded, lossy=lossy)
            if lossy is not None and lossy.values:
                done.rounded = lossy.values
                done.records.measures |= {UP_BITS: lossy.bits_a_value(len(frame)), UP_ERROR: lossy.nmse}
                lost = lossy.residual
        done.records.check()
        if state is not None or lost or retained:
            done.version = job.version + 1
            own = b"" if state is None else bytes(pack_state(state))
            self.store.save(Kept(own, lost, retained) if lost or retained else state, job.client, done.version)
        if job.save_every:
            for name in (*(part.handler for part in job.waited), job.handler):
                FileSaves(self.store.folder, training_name(job, name), job.save_every).clear()
        done.seconds = time.monotonic() - started
        return done, frame

    def _site(self, job: Job, handler: str, done: Done) -> Site:
        """The site passed to a handler of the job, whose records go to `done`; seeds the global generators."""
        site = Site(self.task, job.client, job.round, handler, self._shared, job.scored)
        site.records = done.records
        saves = FileSaves(self.store.folder, training_name(job, handler), job.save_every) if job.save_every else None
        apart = len(site.validation) and not len(self.task.data.validation or ())
        site.given = Given(job.steps, saves, job.scored and bool(apart))
        seed_all(site.seed)
        return site

    def save_model(self, client: Id, version: int, t: int, folder: Path, about: dict[str, Any]) -> None:
        """Save a client's own model, if the method has one."""
        if not self.method.has_local_models(self.task.problem.own):
            return
        site = Site(self.task, client, t, SAVE, scored=False)
        with untouched():  # this may be the user's own process
            seed_all(site.seed)
            model = self.method.local_model(self._state(Job(0, SAVE, client, t, False, version))[0], site)
            model = None if model is None else site.finished(model)
        if model is not None:
            save_model(model, folder / f"client-{client}.safetensors", about)

    def _state(self, job: Job) -> tuple[Any, dict[str, State], dict[str, bytes]]:
        """The client's state, the rounding error of its replies, and its last rounded messages. Of a client without a
        state of the method's own, the latter two may be lost. Raises UserError if more is."""
        if job.version and self.store.path(job.client, job.version).exists():
            return self._stored(job.client, job.version)
        if self.state_class is None:
            return None, {}, {}
        site = Site(self.task, job.client, 0, "client", Shared(models=self._shared.models))
        seed_all(site.seed)
        state = self.method.client(site)
        check_state(self.method, "client", state)
        if job.version and state is not None:
            raise UserError(f"the client's state (version {job.version}) is gone from its node")
        return state, {}, {}

    def _stored(self, client: Id, version: int) -> tuple[Any, dict[str, State], dict[str, bytes]]:
        """As `_state`, of a stored version, with or without rounding."""
        parsed = self.store.parsed(client, version)
        kind: Any = self.state_class
        if parsed.kind != Kept.__name__:
            return unpack_state(kind, parsed), {}, {}
        kept = unpack_state(Kept, parsed)
        return unpack_state(kind, kept.state) if kept.state else None, kept.lost, kept.heard

    def _received(
        self, job: Job, frames: Sequence[memoryview], layout: Layout, retained: dict[str, bytes]
    ) -> dict[int, Received]:
        """The messages by number, each decoded once for all clients; updates `retained` to the client's last rounded
        messages."""
        known, self._messages = self._messages, {}
        there = job.message is not None and job.message.number in known  # then its origin needs no decoding
        first = self.firsts.of(job.client)
        for part, frame in zip(job.parts, frames, strict=True):
            kind = self._handlers.named(part.handler).message
            if kind is None:
                raise MethodError("it is sent a message, but its type hints say None")
            if part.kind == "origin":
                if not there:
                    whole = unpack(kind, frame, layout=layout, base=first.on_grid)
                    retained[part.handler] = serialised(whole, layout)
                continue
            if part.number in known:
                self._messages[part.number] = known[part.number]
            elif part.kind == "next":
                self._messages[part.number] = followed(kind, frame, layout, retained.get(part.handler))
            else:
                message = unpack(kind, frame, layout=layout, base=first.on_grid if part.kind else first.exact)
                kept = serialised(message, layout) if part.kind else b""
                base = base_of(digest_of(kept or frame), message)
                self._messages[part.number] = Received(message, base, kept)
            if part.kind:
                retained[part.handler] = self._messages[part.number].kept
        return self._messages


def training_name(job: Job, handler: str) -> str:
    """The begin of the names of files with a job's local training, which are of its client in a store."""
    return f"{job.client}-{job.round}-{handler}"


def lossy_for(rate: Rate, statistics: Set[str], lost: Mapping[str, State], averaged: bool = False) -> Lossy:
    """The rounding of a message or reply, which also sends the `lost` rounding error; `statistics` are rounded
    finely. `averaged`: as in `Lossy`."""
    return Lossy(rate, statistics, {path: dict(state) for path, state in lost.items()}, averaged, fine=statistics)


def unchanged(*bases: Base | None) -> None:
    """Raises MethodError if a message's tensors, the base of later frames, were changed in place."""
    for base in bases:
        if base is not None and base.changed():
            raise MethodError(f"the message's {base.changed()[0]!r} was changed in place: change a copy")


def packed(
    handler: Handler, message: Any, layout: Layout, base: Base | None, coded: bool
) -> tuple[Frame | None, Counted]:
    """A message's frame and counted size; None for None. Raises MethodError if it is not of the handler's class."""
    if message is None:
        return None, Counted()
    handler.check(message)
    return pack(message, layout=layout, base=base, coded=coded), counted(message)
