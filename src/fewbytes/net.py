"""The only way anything moves between a method's two halves, and the ledger of every byte that did."""

from __future__ import annotations

import types
import typing
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fewbytes.errors import MethodError
from fewbytes.method import Id, Method, Site, Task
from fewbytes.streams import stream
from fewbytes.wire import Counted

Sent = TypeVar("Sent")
Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Row:
    """One exchange with one client: frame lengths in bytes, and what papers count for the same payloads."""

    round: int
    handler: str
    client: Id
    bytes_down: int
    bytes_up: int
    down: Counted
    up: Counted


class Ledger:
    """Every exchange of a run, in order: who, when, which handler, how many bytes each way."""

    COLUMNS = (
        "round", "handler", "client", "bytes_down", "bytes_up",
        "value_bytes_down", "value_bytes_up", "mask_bits_down", "mask_bits_up",
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
             row.down.value_bytes, row.up.value_bytes, row.down.mask_bits, row.up.mask_bits)
        )  # fmt: skip

    def columns(self, start: int = 0) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
        """The columns from row `start` on as int64 arrays; `handler` is a number into `handlers`."""
        table = np.frombuffer(self._rows.tobytes(), np.int64).reshape(-1, len(self.COLUMNS))[start:]
        return {name: table[:, i] for i, name in enumerate(self.COLUMNS)}

    def totals(self, start: int = 0) -> dict[str, int]:
        """Bytes from row `start` on: `uplink_bytes`, `downlink_bytes`, and what papers count for them (nominal)."""
        c = self.columns(start)
        nominal = {way: c[f"value_bytes_{way}"] + (c[f"mask_bits_{way}"] + 7) // 8 for way in ("up", "down")}
        return {
            "uplink_bytes": int(c["bytes_up"].sum()),
            "downlink_bytes": int(c["bytes_down"].sum()),
            "uplink_nominal_bytes": int(nominal["up"].sum()),
            "downlink_nominal_bytes": int(nominal["down"].sum()),
        }

    def write_parquet(self, path: Path) -> None:
        """The ledger as a Parquet file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = self.columns()
        arrays: dict[str, Any] = {
            name: pa.array(values, pa.int32() if name in ("round", "client") else pa.int64())
            for name, values in columns.items()
            if name != "handler"
        }
        names = np.array(self.handlers or [""], dtype=object)
        arrays["handler"] = pa.array(names[columns["handler"]] if len(self) else [], pa.string())
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
        """Read a handler's type hints. Raises MethodError if they do not say what travels."""
        name = getattr(function, "__name__", repr(function))
        try:
            hints = typing.get_type_hints(function)
        except NameError as error:
            raise MethodError(f"the type hints of handler {name!r} cannot be resolved: {error}") from None
        names = [n for n in hints if n != "return"]
        if len(names) != 3 or "return" not in hints or not issubclass(hints[names[2]], Site):
            raise MethodError(f"handler {name!r} must be typed (self, state: …, message: …, site: Site) -> …")
        message, reply = required(hints[names[1]]), required(hints["return"])
        return cls(name, *(None if kind is type(None) else kind for kind in (message, reply)))


def required(kind: Any) -> Any:
    """The type T of `T | None`, or the type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
        if len(kinds) == 1:
            return kinds[0]
    return kind


class Network(ABC):
    """What a server half may use: the clients, calls to their handlers, named randomness, the ledger.

    One call at a time: a call inside a call, or one left half-read, is an error in every engine.
    """

    def __init__(self, method: Method, task: Task, ledger: Ledger | None = None) -> None:
        self.method, self.task = method, task
        self.clients: list[Id] = task.clients
        self.ledger = Ledger() if ledger is None else ledger
        self.records: dict[str, dict[Id, float]] = {}
        """What handlers recorded for people since the round began: name, client, value."""
        self.t = 0
        self.rng: np.random.Generator = stream(task.seed, "server", 0)
        self.scored = True
        self.on_reply: Callable[[Id], None] = lambda client: None
        """Told of every exchange that ended (for a progress display)."""
        self._handlers: dict[str, Handler] = {}
        self._open: str | None = None

    def begin(self, t: int, scored: bool = True) -> None:
        """Start round t (0: before the first): the server's named randomness, no records."""
        self.t, self.scored, self.records = t, scored, {}
        self.rng = stream(self.task.seed, "server", t)

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

        `to`: clients that all get `send`, or a mapping from client to its own message. Read it to the end.
        """
        asked = list(to)
        if len(set(asked)) != len(asked):
            raise MethodError("a client is asked twice in one call")
        unknown = [i for i in asked if i not in self.clients]
        if unknown:
            raise MethodError(f"unknown clients are asked: {unknown[:5]}")
        messages: Mapping[Id, Any] = to if isinstance(to, Mapping) else dict.fromkeys(asked, send)
        return self._read(self._handler(handler), asked, messages)

    def tell(
        self,
        handler: Callable[[Any, Sent, Site], None],
        to: Iterable[Id] | Mapping[Id, Sent],
        send: Sent | None = None,
    ) -> None:
        """The same for a handler without reply; returns when all have run."""
        for _ in self.call(handler, to, send):
            pass

    def idle(self) -> None:
        """Raises MethodError if a call was left half-read."""
        if self._open is not None:
            raise MethodError(f"the call of {self._open!r} was not read to its end before the next step")

    def _handler(self, function: Callable[..., Any]) -> Handler:
        if getattr(function, "__self__", None) is not self.method:
            raise MethodError(f"{function!r} is not a handler of the method that runs: call self.<handler>")
        name = function.__name__
        if name not in self._handlers:
            self._handlers[name] = Handler.of(function)
        return self._handlers[name]

    def _read(self, handler: Handler, asked: list[Id], messages: Mapping[Id, Any]) -> Iterator[tuple[Id, Any]]:
        self.idle()
        self._open = handler.name
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
