"""The only way anything moves between a method's two halves, and the ledger of every byte that did."""

from __future__ import annotations

import math
import types
import typing
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from fewbytes import gallery
from fewbytes.errors import FewbytesError, MethodError, UserError
from fewbytes.method import Id, Method, Site, Task
from fewbytes.records import Gathered
from fewbytes.streams import stream
from fewbytes.wire import Counted
from fewbytes.wire.payload import check_fields

Held = list[int] | int | None
"""What a node tells of a split of its client's: samples of each class, their number, or nothing."""
Sent = TypeVar("Sent")
Reply = TypeVar("Reply")


OUTCOMES = ("answered", "unreachable", "late", "failed", "rejected", "surplus")
"""How an exchange can end: with a reply; the node was not there; nothing came in time; its handler failed; what came
was no valid reply; or more clients were asked than needed and others were faster."""


@dataclass(frozen=True)
class Row:
    """One exchange with one client: frame lengths in bytes, what papers count for the same payloads, how it ended."""

    round: int
    handler: str
    client: Id
    bytes_down: int
    bytes_up: int
    down: Counted
    up: Counted
    outcome: str = "answered"  # one of OUTCOMES


@dataclass(frozen=True)
class Policy:
    """Whose replies an exchange needs, and on Flower waits for. Raises UserError for values out of range."""

    min_replies: float = 0.5  # part of the clients asked that must answer, or the run stops
    round_timeout: float = 3600.0  # seconds an exchange waits for its clients
    over_selection: float = 0.0  # asks a cohort this part larger than it must be; the first to answer are taken
    connect_timeout: float = 300.0  # seconds the start waits for all clients; who comes later joins between rounds

    def __post_init__(self) -> None:
        for name, fits, words in (
            ("min_replies", 0 < self.min_replies <= 1, "in (0, 1]"),
            ("round_timeout", 0 < self.round_timeout < math.inf, "above 0"),
            ("over_selection", 0 <= self.over_selection <= 10, "in [0, 10]"),
            ("connect_timeout", 0 < self.connect_timeout < math.inf, "above 0"),
        ):
            if not fits:
                raise UserError(f"{name} must be {words}, not {getattr(self, name)!r}")


class TooFewReplies(FewbytesError):
    """Fewer clients answered than the policy asks for; the run can go on from its last checkpoint."""


class Refused(FewbytesError):
    """A newcomer the method cannot serve, why in words: `Method.join` raises it, and the run goes on without it."""


@dataclass(frozen=True)
class LeftOut:
    """A client whose reply took no part in an exchange, and why in words."""

    client: Id
    handler: str
    outcome: str
    why: str


def numbers(clients: Iterable[Id]) -> str:
    """Clients as people write many of them: '3, 7, 10 to 59'."""
    these = set(clients)
    spans = zip(
        sorted(i for i in these if i - 1 not in these), sorted(i for i in these if i + 1 not in these), strict=True
    )
    return ", ".join(str(a) if a == b else f"{a} to {b}" if b > a + 1 else f"{a}, {b}" for a, b in spans)


class Ledger:
    """Every exchange of a run, in order: who, when, which handler, how many bytes each way."""

    COLUMNS = (
        "round", "handler", "client", "bytes_down", "bytes_up",
        "value_bytes_down", "value_bytes_up", "mask_bits_down", "mask_bits_up", "outcome",
    )  # fmt: skip

    def __init__(self) -> None:
        self._rows = array("q")
        self.handlers: list[str] = []

    def __len__(self) -> int:
        return len(self._rows) // len(self.COLUMNS)

    def add(self, row: Row) -> None:
        if row.handler not in self.handlers:
            self.handlers.append(row.handler)
        self._rows.extend(
            (row.round, self.handlers.index(row.handler), row.client, row.bytes_down, row.bytes_up,
             row.down.value_bytes, row.up.value_bytes, row.down.mask_bits, row.up.mask_bits,
             OUTCOMES.index(row.outcome))
        )  # fmt: skip

    def columns(self, start: int = 0) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
        """The columns from row `start` on, int64; `handler` is a number into `handlers`, `outcome` into OUTCOMES."""
        table = np.frombuffer(self._rows.tobytes(), np.int64).reshape(-1, len(self.COLUMNS))[start:]
        return {name: table[:, i] for i, name in enumerate(self.COLUMNS)}

    def totals(self, start: int = 0) -> dict[str, int]:
        """Bytes from row `start` on: `uplink_bytes`, `downlink_bytes`, what papers count for them (nominal), and of
        that the values alone."""
        c = self.columns(start)
        nominal = {way: c[f"value_bytes_{way}"] + (c[f"mask_bits_{way}"] + 7) // 8 for way in ("up", "down")}
        return {
            "uplink_bytes": int(c["bytes_up"].sum()),
            "downlink_bytes": int(c["bytes_down"].sum()),
            "uplink_nominal_bytes": int(nominal["up"].sum()),
            "downlink_nominal_bytes": int(nominal["down"].sum()),
            "uplink_value_bytes": int(c["value_bytes_up"].sum()),
            "downlink_value_bytes": int(c["value_bytes_down"].sum()),
        }

    def write_parquet(self, path: Path) -> None:
        """The ledger as a Parquet file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = self.columns()
        arrays: dict[str, Any] = {
            name: pa.array(values, pa.int32() if name in ("round", "client") else pa.int64())
            for name, values in columns.items()
            if name not in ("handler", "outcome")
        }
        for name, words in (("handler", self.handlers or [""]), ("outcome", OUTCOMES)):
            arrays[name] = pa.array(np.array(words, dtype=object)[columns[name]] if len(self) else [], pa.string())
        pq.write_table(pa.table({name: arrays[name] for name in self.COLUMNS}), path)

    def tobytes(self) -> bytes:
        """The rows as bytes, for a checkpoint."""
        return self._rows.tobytes()

    @classmethod
    def frombytes(cls, rows: bytes, handlers: list[str]) -> Ledger:
        """Undo `tobytes`."""
        ledger = cls()
        ledger._rows.frombytes(rows)
        ledger.handlers = list(handlers)
        return ledger


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
