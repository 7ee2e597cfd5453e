"""Running one client handler: state and message in, state, reply and measurements out. The same for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from fewbytes.base.errors import MethodError
from fewbytes.base.streams import seed_all, untouched
from fewbytes.core.method import Method
from fewbytes.core.metrics import Scores
from fewbytes.core.network import Handler
from fewbytes.core.problem import Id, Task
from fewbytes.core.records import Records
from fewbytes.core.site import Site
from fewbytes.engines.store import ClientStore
from fewbytes.models.files import save_model
from fewbytes.wire import Base, Counted, Frame, Layout, counted, pack, unpack

SCORE, SAVE = ":score", ":save"  # what an engine asks of a client besides the method's own handlers


SampleCounts = list[int] | int | None
"""How many samples a split of a client's has, as its node says: of each class, in all, or nothing."""


class Part(msgspec.Struct, array_like=True):
    """A message that comes with a job: for which handler, its number, where its frame lies and how long that is."""

    handler: str
    number: int
    at: str
    length: int


class Job(msgspec.Struct, array_like=True):
    """One handler to run on one client."""

    number: int
    handler: str
    client: Id
    round: int
    scored: bool
    version: int  # of the client's state; 0: none yet
    waited: list[Part] = []  # messages that waited for this request, whose handlers run first
    message: Part | None = None  # the message to answer; None: nothing was sent
    reply_to: str = ""  # where a long reply may be written

    @property
    def parts(self) -> list[Part]:
        """All messages, in the order of their frames."""
        return [*self.waited, *([] if self.message is None else [self.message])]


class Done(msgspec.Struct, array_like=True):
    """What came of a job. The reply's frame is `reply`, or the first `length` bytes at the job's `reply_to`."""

    number: int
    version: int = 0
    reply: bytes = b""
    length: int = 0
    records: Records = msgspec.field(default_factory=Records)
    scores: Scores = {}  # of the client's own model
    error: str = ""
    trace: str = ""
    sample_counts: tuple[SampleCounts, SampleCounts] | None = None  # of a client's training and test split


class Runner:
    """Runs handlers of one method on one task, against client states in a store."""

    def __init__(self, method: Method, task: Task, store: ClientStore, coded: bool) -> None:
        self.method, self.task, self.store, self.coded = method, task, store, coded
        self.state_class = method.state_class("client")
        if task.problem.privacy is not None:
            task.problem.privacy.prepare({len(client.train) for client in task.data.clients} - {0})
        self._models: dict[Any, nn.Module] = {}
        self._handlers: dict[str, Handler] = {}
        self._messages: dict[int, tuple[Any, Base]] = {}  # of the last job, by number: the next may get the same

    def run(self, job: Job, frames: Sequence[memoryview]) -> tuple[Done, Frame | None]:
        """Run one job; the new state is stored before this returns. `frames`: of the job's messages."""
        layout = self.task.problem.layout(job.client)
        state = self._state(job)
        done = Done(job.number, version=job.version)
        if job.handler == SCORE:
            site = self._site(job, SCORE, done)
            model = self.method.local_model(state, site)
            if model is not None and len(site.test):
                done.scores = site.scores(model)
            return done, None
        received = self._received(job, frames, layout)
        for part in job.waited:
            getattr(self.method, part.handler)(state, received[part.number][0], self._site(job, part.handler, done))
        handler = self._handler(job.handler)
        message = None if job.message is None else received[job.message.number][0]
        reply = getattr(self.method, handler.name)(state, message, self._site(job, handler.name, done))
        bases = [base for _, base in received.values()]
        unchanged(*bases)
        frame: Frame | None = None
        if handler.reply is not None:
            if type(reply) is not handler.reply:
                raise MethodError(f"it must reply a {handler.reply.__name__}, it replied a {type(reply).__name__}")
            frame = pack(reply, layout=layout, base=Base.together(bases), coded=self.coded)
        done.records.check()
        if state is not None:
            done.version = job.version + 1
            self.store.save(state, job.client, done.version)
        return done, frame

    def _site(self, job: Job, handler: str, done: Done) -> Site:
        """What a handler of the job sees, which measures into `done`; the global generators are seeded for it."""
        site = Site(self.task, job.client, job.round, handler, self._models, job.scored, self.store)
        site.records = done.records
        seed_all(site.seed)
        return site

    def save_model(self, client: Id, version: int, t: int, folder: Path, about: dict[str, Any]) -> None:
        """Save a client's own model, if the method has one."""
        if type(self.method).local_model is Method.local_model:
            return
        site = Site(self.task, client, t, SAVE, scored=False)
        with untouched():  # a process of the user's own may be the one
            seed_all(site.seed)
            model = self.method.local_model(self._state(Job(0, SAVE, client, t, False, version)), site)
        if model is not None:
            save_model(model, folder / f"client-{client}.safetensors", about)

    def _state(self, job: Job) -> Any:
        if self.state_class is None:
            return None
        if job.version:
            return self.store.load(self.state_class, job.client, job.version)
        site = Site(self.task, job.client, 0, "client", self._models)
        seed_all(site.seed)
        return self.method.client(site)

    def _handler(self, name: str) -> Handler:
        if name not in self._handlers:
            self._handlers[name] = Handler.of(getattr(self.method, name))
        return self._handlers[name]

    def _received(self, job: Job, frames: Sequence[memoryview], layout: Layout) -> dict[int, tuple[Any, Base]]:
        """The messages by number, each decoded once however many clients it goes to, and what replies are coded
        against."""
        known, self._messages = self._messages, {}
        for part, frame in zip(job.parts, frames, strict=True):
            kind = self._handler(part.handler).message
            if kind is None:
                raise MethodError("it is sent a message, but its type hints say None")
            if part.number in known:
                self._messages[part.number] = known[part.number]
            else:
                received = unpack(kind, frame, layout=layout)
                self._messages[part.number] = received, Base.of(bytes(frame[-32:]), received)
        return self._messages


def unchanged(*bases: Base | None) -> None:
    """Raises MethodError if a message's tensors were changed in place while both ends count on them."""
    for base in bases:
        if base is not None and base.changed():
            raise MethodError(f"the message's {base.changed()[0]!r} was changed in place: change a copy")


def packed(handler: Handler, message: Any, layout: Layout, coded: bool) -> tuple[Frame | None, Counted]:
    """A message as it travels: nothing for None. Raises MethodError if it is not of the handler's class."""
    if message is None:
        return None, Counted()
    if type(message) is not handler.message:
        wanted = "nothing" if handler.message is None else f"a {handler.message.__name__}"
        raise MethodError(f"handler {handler.name!r} takes {wanted}, it was sent a {type(message).__name__}")
    return pack(message, layout=layout, coded=coded), counted(message)
