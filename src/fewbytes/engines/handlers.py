"""Running one client handler: state and message in, state, reply and measurements out. The same for every engine."""

from __future__ import annotations

import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from fewbytes.base.errors import MethodError
from fewbytes.base.streams import seed_all, untouched
from fewbytes.core.method import Method
from fewbytes.core.network import Handler, Held
from fewbytes.core.problem import Id, Task
from fewbytes.core.records import Records
from fewbytes.core.site import Site
from fewbytes.core.training import evaluate
from fewbytes.engines.store import ClientStore, state_class
from fewbytes.models.files import save_model
from fewbytes.wire import Base, Counted, Frame, Layout, counted, pack, unpack

SCORE, SAVE = ":score", ":save"  # what an engine asks of a client besides the method's own handlers


class Job(msgspec.Struct, array_like=True):
    """One handler to run on one client."""

    number: int
    handler: str
    client: Id
    round: int
    scored: bool
    version: int  # of the client's state; 0: none yet
    message: int = 0  # the number of the message to answer; 0: nothing was sent
    message_at: str = ""  # where its frame lies
    message_length: int = 0
    reply_to: str = ""  # where a long reply may be written


class Done(msgspec.Struct, array_like=True):
    """What came of a job. The reply's frame is `reply`, or the first `length` bytes at the job's `reply_to`."""

    number: int
    version: int = 0
    reply: bytes = b""
    length: int = 0
    up: tuple[int, int] = (0, 0)  # what papers count for the reply: value bytes, mask bits
    records: Records = msgspec.field(default_factory=Records)
    score: tuple[int, int] = (0, 0)  # correct, samples
    error: str = ""
    trace: str = ""
    held: tuple[Held, Held] | None = None  # what a node tells of its client's training and test samples


class Runner:
    """Runs handlers of one method on one task, against client states in a store."""

    def __init__(self, method: Method, task: Task, store: ClientStore, coded: bool) -> None:
        self.method, self.task, self.store, self.coded = method, task, store, coded
        self.state_class = state_class(method, "client")
        self._models: dict[Any, nn.Module] = {}
        self._handlers: dict[str, Handler] = {}
        self._message: tuple[int, Any, Base] | None = None

    def run(self, job: Job, message: memoryview | None) -> tuple[Done, Frame | None]:
        """Run one job; the new state is stored before this returns. `message` is the frame the job names."""
        layout = self.task.layout(job.client)
        state = self._state(job)
        site = Site(self.task, job.client, job.round, job.handler, self._models, job.scored)
        seed_all(site.seed)
        done = Done(job.number, version=job.version)
        if job.handler == SCORE:
            model = self.method.local_model(state, site)
            if model is not None and len(site.test):
                x, y = site.samples(site.test)
                done.score = (evaluate(model, x, y, self.task.precision)[0], len(y))
            return done, None
        handler = self._handler(job.handler)
        received, base = self._received(job, handler, message, layout)
        reply = getattr(self.method, handler.name)(state, received, site)
        unchanged(base)
        frame: Frame | None = None
        if handler.reply is not None:
            if type(reply) is not handler.reply:
                raise MethodError(f"it must reply a {handler.reply.__name__}, it replied a {type(reply).__name__}")
            frame = pack(reply, layout=layout, base=base, coded=self.coded)
            count = counted(reply)
            done.up = (count.value_bytes, count.mask_bits)
        if state is not None:
            done.version = job.version + 1
            self.store.save(state, job.client, done.version)
        done.records = site.records
        return done, frame

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

    def _received(
        self, job: Job, handler: Handler, message: memoryview | None, layout: Layout
    ) -> tuple[Any, Base | None]:
        """The message, decoded once however many clients it goes to, and the base it makes for the reply."""
        if not job.message or message is None:
            return None, None
        if self._message is None or self._message[0] != job.message:
            if handler.message is None:
                raise MethodError("it is sent a message, but its type hints say None")
            received = unpack(handler.message, message, layout=layout)
            self._message = (job.message, received, Base.of(bytes(message[-32:]), received))
        return self._message[1:]


def handlers_of(method: type[Method]) -> list[str]:
    """The names of a method's client handlers: what takes (state, message, site: Site)."""
    names = []
    for name, function in inspect.getmembers(method, inspect.isfunction):
        if list(inspect.signature(function).parameters)[3:] and not hasattr(Method, name):
            with suppress(MethodError, TypeError):
                names.append(Handler.of(function).name)
    return names


def unchanged(base: Base | None) -> None:
    """Raises MethodError if a message's tensors were changed in place while both ends count on them."""
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
