"""The only way anything moves between a method's two halves, and the ledger of every byte that did."""

from __future__ import annotations

import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from fewbytes.base.errors import FewbytesError, MethodError
from fewbytes.base.streams import stream
from fewbytes.core import gallery
from fewbytes.core.ledger import Ledger, LeftOut
from fewbytes.core.method import Method
from fewbytes.core.problem import Id, Task
from fewbytes.core.records import Gathered
from fewbytes.core.site import Site
from fewbytes.wire.fields import check_fields

Held = list[int] | int | None
"""What a node tells of a split of its client's: samples of each class, their number, or nothing."""
Sent = TypeVar("Sent")
Reply = TypeVar("Reply")


class Refused(FewbytesError):
    """A newcomer the method cannot serve, why in words: `Method.join` raises it, and the run goes on without it."""


@dataclass(frozen=True)
class Handler:
    """A client handler of a method: its name, and the payload classes of its message and reply (None: nothing)."""

    name: str
    message: type[Any] | None
    reply: type[Any] | None

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Handler:
        """Read a handler's type hints. Raises MethodError if they do not say what travels, or it cannot."""
        name = getattr(function, "__name__", repr(function))
        try:
            hints = typing.get_type_hints(function)
        except NameError as error:
            raise MethodError(f"the type hints of handler {name!r} cannot be resolved: {error}") from None
        names = [n for n in hints if n != "return"]
        if len(names) != 3 or "return" not in hints or not issubclass(hints[names[2]], Site):
            raise MethodError(f"handler {name!r} must be typed (self, state: …, message: …, site: Site) -> …")
        kinds = [required(hints[names[1]]), required(hints["return"])]
        for kind in kinds:
            if kind is not type(None):
                check_fields(kind)
        return cls(name, *(None if kind is type(None) else kind for kind in kinds))


def required(kind: Any) -> Any:
    """The type T of `T | None`, or the type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
        if len(kinds) == 1:
            return kinds[0]
    return kind


class Network(ABC):
    """What a server half may use: the clients, calls to their handlers, named randomness, the ledger.

    One call at a time: a call inside a call, or one left unread or half-read, is an error in every engine.
    """

    def __init__(self, method: Method, task: Task, ledger: Ledger | None = None) -> None:
        self.method, self.task = method, task
        self.clients: list[Id] = task.data.present(1)
        """The clients the run knows and that have not left, in ascending order."""
        self.ledger = Ledger() if ledger is None else ledger
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
        self.rng: np.random.Generator = stream(task.seed, "server", 0)
        self.scored = True
        self.on_reply: Callable[[Id], None] = lambda client: None
        """Told of every exchange that ended (for a progress display)."""
        self.versions: dict[Id, int] = {}
        """The version of each client's state, as of its last accepted reply."""
        self.held: dict[Id, tuple[Held, Held]] = {}
        """What nodes told of their clients' training and test samples, where those are not here."""
        self.peak_memory_bytes = 0
        self._handlers: dict[str, Handler] = {}
        self._open: str | None = None

    def begin(self, t: int, scored: bool = True, *names: int | str) -> None:
        """Start round t (0: before the first) or the step of it that `names` name: named randomness, no records."""
        self.t, self.scored, self.records, self.shown = t, scored, Gathered(), {}
        self.left_out, self.notes, self.not_finite = [], {}, set()
        self.rng = stream(self.task.seed, "server", t, *names)

    def sample(self, fraction: float) -> list[Id]:
        """A random cohort: round(fraction * clients), at least one, in ascending order."""
        if not 0 < fraction <= 1:
            raise MethodError(f"a cohort is a fraction in (0, 1] of the clients, got {fraction}")
        count = max(1, round(fraction * len(self.clients)))
        if count == len(self.clients):
            return list(self.clients)
        return sorted(int(i) for i in self.rng.choice(self.clients, count, replace=False))

    def call(
        self,
        handler: Callable[[Any, Sent, Site], Reply],
        to: Iterable[Id] | Mapping[Id, Sent],
        send: Sent | None = None,
    ) -> Iterator[tuple[Id, Reply]]:
        """Run a handler on clients; yields (client, reply) in the order asked, one reply in memory at a time.

        `to`: clients that all get `send`, or a mapping from client to its own message; those that have left by the
        task's schedule are passed over. Read it to the end: clients run as their replies are read.
        """
        self.idle()
        asked = [i for i in to if i in self.clients or not self._has_left(i)]
        if len(set(asked)) != len(asked):
            raise MethodError("a client is asked twice in one call")
        unknown = [i for i in asked if i not in self.clients]
        if unknown:
            raise MethodError(f"unknown clients are asked: {unknown[:5]}")
        messages: Mapping[Id, Any] = to if isinstance(to, Mapping) else dict.fromkeys(asked, send)
        called = self._handler(handler)
        self._open = called.name  # from now on, so that a call nobody reads is told, too
        return self._read(called, asked, messages)

    def tell(
        self,
        handler: Callable[[Any, Sent, Site], None],
        to: Iterable[Id] | Mapping[Id, Sent],
        send: Sent | None = None,
    ) -> None:
        """The same for a handler without reply; returns when all have run."""
        for _ in self.call(handler, to, send):
            pass

    def show_images(self, name: str, images: Tensor, labels: Sequence[str], largest: int = gallery.LARGEST) -> None:
        """Show people images (n, 1 or 3, height, width), uint8, and a label of each; steers nothing.

        They are kept in the run folder, and the report lays them out by label and round. In a round that is not
        scored, and before the first, they are dropped. `name`: a file name's part, of a-z, 0-9 and -. `largest`: pixels
        a side above which images are scaled down, up to `gallery.LIMIT`. Raises MethodError.
        """
        file = gallery.file_name(name, "png")
        if self.scored and len(images):
            self.shown[file] = gallery.sheet(images, labels, largest)

    def show_points(self, name: str, panels: Mapping[str, gallery.Points]) -> None:
        """Show people points of many dimensions, as `show_images` does images; steers nothing.

        A panel, by its title, is a mapping from series to points (n, d) and their classes (n,), integers, or None.
        All points of a panel are shown together by their first two principal components; d may differ by panel.
        """
        file = gallery.file_name(name, "json")
        if self.scored:
            self.shown[file] = gallery.maps(panels)

    def show_shares(self, name: str, rows: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Show people in what share of the rounds each element of some layers was active; steers nothing.

        `rows`: what is compared (clients, the server), each a mapping from layer to values in [0, 1], of any shape that
        is the same in all rows. Kept as `show_images` keeps images; the report draws the last. Raises MethodError.
        """
        file = gallery.file_name(name, "shares.json")
        if self.scored:
            self.shown[file] = gallery.shares(rows)

    def note(self, what: str, how_much: str) -> None:
        """Tell people what they should know of this round to read its results, in the same words each time it is so,
        and how much of it there was; steers nothing. The live line, the table and the report say it."""
        self.notes[what] = how_much

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

    def _has_left(self, client: Id) -> bool:
        presence = self.task.data.presence
        last = presence[client][1] if presence is not None and client in self.task.clients else None
        return last is not None and last < self.t

    def _handler(self, function: Callable[..., Any]) -> Handler:
        if getattr(function, "__self__", None) is not self.method:
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

    @abstractmethod
    def score_clients(self) -> dict[Id, tuple[int, int]]:
        """(correct, samples) of every client's own model on its test split; empty if the method has none."""

    @abstractmethod
    def save_models(self, folder: Path, about: dict[str, Any]) -> None:
        """Save every client's own model, if the method has one, as `client-<i>.safetensors`, where the client is."""

    def arrivals(self, t: int) -> list[Id]:
        """Clients that are there for round t and can be reached, but are not known to the run yet, ascending."""
        return [i for i in self.task.data.present(t) if i not in self.clients]

    def checkpointed(self) -> None:
        """The run can go on from the states of `versions`: older ones may go."""
