"""Any Flower ServerApp in few bytes: a grid that encodes what a strategy sends and decodes what clients reply.

Strategy, metrics, evaluation and logs stay Flower's. The clients' half is `fewbytes.flower.mod`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from fewbytes.base.errors import FrameError, UserError, with_article
from fewbytes.codec import Stream, decode, encode
from fewbytes.codec.coder import LIMIT, check_bits, same
from fewbytes.codec.states import AnyState, Exact, FirstState, check_exact, first_state, packable
from fewbytes.flower.byte_ledger import ByteLedger
from fewbytes.flower.kept_state import forget_run
from fewbytes.flower.private.messages import failed, in_reply_to
from fewbytes.flower.records import KEY, UNKNOWN, Arrays, arrays_of, data_of, encoded, nbytes, record_of, with_records

LOG = logging.getLogger("flwr.fewbytes")
POLL = 0.1, 1.0  # seconds between two looks for replies, at first and at most
FAILED = 0  # Flower's code for an unknown error
OUT = "fewbytes-out"  # the key of `out` in the run config
OTHER_FIRST = (
    "the first model is not the weights that first= makes, so it is sent: have the strategy start from these "
    "(ArrayRecord(weights()))"
)


@dataclass
class _Flight:
    """A message on its way: as the strategy made it, what its receiver holds of each record once it has it, the version
    of each stream, and whether the receiver is known to use the mod. `first`: the id that the strategy knows it by."""

    message: Message
    held: dict[str, Arrays]
    versions: dict[str, int]
    known: bool
    first: str = ""


@dataclass
class _Node:
    """What is known of a node: whether it uses the mod (None: not known yet), its last accepted reply's number, and
    whether a message to it is `plain` until it has replied."""

    uses_mod: bool | None = None
    accepted: int = 0
    plain: bool = True


@dataclass
class _Batch:
    """Messages that leave together. `read`: the arrays of each record; `held`: by name, where all records of that name
    are equal, the version of a stream that they are."""

    read: dict[int, Arrays | None] = field(default_factory=dict)
    held: dict[str, Arrays] = field(default_factory=dict)


def _compare_first(stream: Stream, model: Arrays, first: AnyState | None) -> None:
    """Log it if a stream's first model is another than what both ends hold."""
    if stream.version == 1 and first is not None:
        one, other = packable(model).values.dense(), packable(first).values.dense()
        if one.keys() != other.keys() or not all(torch.equal(one[name], other[name]) for name in one):
            LOG.warning(OTHER_FIRST)


class FewGrid(Grid):
    """A Flower grid over another one, whose messages of arrays are encoded.

    `bits`: how many each value sent to clients takes, about, as the difference from the model that they hold; None is
    lossless. `exact`: arrays that are not rounded, as in `fewbytes.codec.Encoder`. `feedback`: whether what rounding
    lost is sent with the next model; give False for a strategy that takes steps on a model of its own, such as FedAdam.
    `first`: the weights that the app starts from, or a function that makes them, as each client's `fewbytes_mod` is
    given them too: then they are not sent. A client without them, or without the mod, is sent them after all.
    `out`: a folder for `bytes.jsonl`.
    """

    def __init__(
        self,
        grid: Grid,
        bits: float | None = None,
        *,
        exact: Exact = None,
        feedback: bool = True,
        first: FirstState = None,
        out: str | Path | None = None,
    ) -> None:
        check_bits(bits)
        self._grid, held = grid, first_state(first)
        self._stream = partial(Stream, bits, exact=exact, feedback=feedback, first=held)
        self._new = partial(_Node, plain=held is None)
        self._lock = threading.Lock()  # apps of the old style send from a thread for each client
        self._streams: dict[str, Stream] = {}
        self._nodes: dict[int, _Node] = {}
        self._flights: dict[str, _Flight] = {}
        self.ledger = ByteLedger(None if out is None else Path(out))
        """The bytes of this run so far."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def set_run(self, run: Any) -> None:
        """As the grid beneath."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """As the grid beneath."""
        return self._grid.run

    def create_message(self, *args: Any, **values: Any) -> Message:
        """As the grid beneath."""
        return self._grid.create_message(*args, **values)

    def get_node_ids(self) -> Iterable[int]:
        """As the grid beneath."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """As the grid beneath."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Encode and push messages; returns their ids."""
        with self._lock:
            flights = self._encoded(list(messages))
            ids = list(self._grid.push_messages([sent for _, sent in flights]))
            for name, (flight, _) in zip(ids, flights, strict=True):
                if name:  # else Flower did not accept the message
                    flight.first = name
                    self._flights[name] = flight
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies to messages, decoded. A node that has lost what it held is sent the whole model, and its reply to
        that is returned later."""
        asked = set(message_ids)
        with self._lock:
            wanted = [name for name, flight in self._flights.items() if flight.first in asked]
            unknown = asked - {self._flights[name].first for name in wanted}
        replies, found = list(self._grid.pull_messages([*wanted, *unknown])), []
        for reply in replies:
            with self._lock:
                flight = self._flights.pop(reply.metadata.reply_to_message_id, None)
                decoded = reply if flight is None else self._decoded(flight, reply)
            if decoded is not None:
                found.append(decoded)
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push messages, and wait for their replies, for `timeout` seconds at most (None: without a limit)."""
        waiting, replies = set(filter(None, self.push_messages(messages))), []
        end, pause = time.monotonic() + (timeout if timeout is not None else float("inf")), POLL[0]
        while waiting and time.monotonic() < end:
            new = list(self.pull_messages(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in new}
            replies += new
            if waiting:
                time.sleep(max(0.0, min(pause, end - time.monotonic())))
                pause = POLL[0] if new else min(1.2 * pause, POLL[1])
        with self._lock:
            for name in [name for name, flight in self._flights.items() if flight.first in waiting]:
                del self._flights[name]
            self.ledger.log(LOG)
        return replies

    def _encoded(self, messages: Sequence[Message], again: bool = False) -> list[tuple[_Flight, Message]]:
        """Messages as they travel. One that is sent `again`, and is not the last model any more, makes no version: it
        goes as it is."""
        batch, named = _Batch(), dict[str, list[Arrays]]()
        for message in messages:
            for name, record in message.content.array_records.items() if message.has_content() else ():
                if id(record) in batch.read:
                    continue
                arrays = batch.read[id(record)] = arrays_of(record)
                if arrays is not None:
                    named.setdefault(name, []).append(arrays)
        for name, (first, *rest) in named.items():
            if all(same(packable(first), packable(other)) for other in rest):
                stream = self._streams.setdefault(name, self._stream())
                if not again or stream.is_last(first):
                    batch.held[name] = stream.advance(first)
                    _compare_first(stream, first, self._stream.keywords["first"])
        return [self._outgoing(message, batch) for message in messages]

    def _outgoing(self, message: Message, batch: _Batch) -> tuple[_Flight, Message]:
        number = message.metadata.dst_node_id
        node = self._nodes.setdefault(number, self._new())
        flight = _Flight(message, {}, {}, node.uses_mod is True or not node.plain)
        if node.uses_mod is False or not (message.has_content() and message.content.array_records):
            self.ledger.sent(message, nbytes(message.content), nbytes(message.content))
            return flight, message
        records: dict[str, ArrayRecord] = {}
        names, how = [], []
        on_its_way = any(other.message.metadata.dst_node_id == number for other in self._flights.values())
        about: dict[str, Any] = {"accepted": UNKNOWN if on_its_way else node.accepted}
        for name, record in message.content.array_records.items():
            arrays = batch.read[id(record)]
            if arrays is None:
                continue
            flight.held[name] = batch.held.get(name, arrays)
            if name not in batch.held:
                records[name], form = (encoded(encode(arrays)), "alone") if flight.known else (record, "")
            else:
                stream = self._streams[name]
                flight.versions[name] = stream.version
                if flight.known:
                    records[name], form = encoded(stream.message(number)), "stream"
                else:
                    records[name], form = record_of(batch.held[name]), "plain"
                    about[f"stream:{name}"] = [stream.name, str(stream.version)]
            if form:
                names.append(name)
                how.append(form)
        about |= {"names": names, "how": how}
        content = with_records(message.content, records, ConfigRecord(about))
        self.ledger.sent(message, nbytes(content), nbytes(message.content))
        return flight, _like(message, content)

    def _decoded(self, flight: _Flight, reply: Message) -> Message | None:
        """A reply as the strategy expects it; None if its node is asked again."""
        number = flight.message.metadata.dst_node_id
        node = self._nodes.setdefault(number, self._new())
        in_reply_to(reply, flight.first)
        if not reply.has_content():
            if node.uses_mod is None and not node.plain and flight.versions:  # it may not use the mod
                self._ask_again(flight, number)
                return None
            return reply
        about = reply.content.config_records.get(KEY)
        if about is None:
            if flight.held and node.uses_mod is None:
                node.uses_mod = False
                LOG.warning("fewbytes: node %d does not use fewbytes_mod: it gets plain messages", number)
            self.ledger.received(flight.message, nbytes(reply.content), nbytes(reply.content))
            return reply
        if about.get("needs") == "whole":
            self._ask_again(flight, number)
            return None
        up = nbytes(reply.content)
        try:
            records = self._records(reply.content, about, flight.held)
        except FrameError as error:
            LOG.warning("fewbytes: the reply of node %d is left out: %s", number, error)
            self.ledger.received(flight.message, up, 0)
            return failed(reply, Error(FAILED, f"fewbytes: {error}"))
        node.uses_mod, node.accepted = True, int(about.get("number", 0))  # type: ignore[arg-type]
        for name, version in flight.versions.items():
            self._streams[name].received(number, version)
        reply.content = with_records(reply.content, records, None)
        self.ledger.received(flight.message, up, nbytes(reply.content))
        return reply

    def _records(self, content: RecordDict, about: ConfigRecord, held: Mapping[str, Arrays]) -> dict[str, ArrayRecord]:
        names, bases = about.get("names"), about.get("bases")
        if not isinstance(names, list) or not isinstance(bases, list) or len(names) != len(bases):
            raise FrameError("type", "the reply does not say how it is encoded")
        records = {}
        for name, base in zip(map(str, names), map(str, bases), strict=True):
            if name not in content.array_records or (base and base not in held):
                raise FrameError("type", "the reply names records that are not there")
            size = sum(array.nbytes for arrays in held.values() for array in arrays.values())
            limit = max(LIMIT, 2 * size)
            arrays = decode(data_of(content.array_records[name]), held[base] if base else None, limit)
            if not isinstance(arrays, dict):
                raise FrameError("type", "the reply's arrays have no names")
            records[name] = record_of(arrays)
        return records

    def _ask_again(self, flight: _Flight, number: int) -> None:
        """Send the whole model to a node that does not hold what the message was encoded against."""
        LOG.info("fewbytes: node %d does not hold what was assumed: it gets the whole model", number)
        self._nodes[number] = _Node(None, self._nodes[number].accepted)
        for stream in self._streams.values():
            stream.forget(number)
        ((again, sent),) = self._encoded([flight.message], again=True)
        again.first = flight.first
        for name in filter(None, self._grid.push_messages([sent])):
            self._flights[name] = again


def compressed(
    app: ServerApp,
    bits: float | None = None,
    *,
    exact: Exact = None,
    feedback: bool = True,
    first: FirstState = None,
    out: str | Path | None = None,
) -> ServerApp:
    """The same ServerApp over a `FewGrid`; its arguments are that grid's. A run config's `fewbytes-out` replaces `out`.

    >>> from flwr.serverapp import ServerApp
    >>> from fewbytes.flower.few_grid import compressed
    >>> app = compressed(ServerApp(), bits=1)
    """
    if not isinstance(app, ServerApp):
        raise UserError(f"compressed takes a ServerApp, not {with_article(type(app))}")
    check_bits(bits)
    check_exact(exact)
    return _Compressed(app, partial(FewGrid, bits=bits, exact=exact, feedback=feedback, first=first, out=out))


class _Compressed(ServerApp):
    """A ServerApp with the parts of another, which may still be decorated."""

    def __init__(self, app: ServerApp, over: Any) -> None:
        vars(self).update(vars(app))
        self._over = over

    def __call__(self, grid: Grid, context: Context) -> None:
        out = context.run_config.get(OUT, "")
        if not isinstance(out, str):
            raise UserError(f"{OUT} is the name of a folder, not {out!r}")
        try:
            super().__call__(self._over(grid, out=out) if out else self._over(grid), context)
        finally:
            forget_run(context.run_id)


def _like(message: Message, content: RecordDict) -> Message:
    about = message.metadata
    return Message(content, about.dst_node_id, about.message_type, ttl=about.ttl, group_id=about.group_id)
