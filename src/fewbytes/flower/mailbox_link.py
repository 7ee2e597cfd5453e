"""Nodes that are reached by files: orders and answers travel in a mailbox; all else is as with connected nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3
from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fewbytes.base.errors import FrameError
from fewbytes.base.files import replacing
from fewbytes.flower.link import Exchange, Link
from fewbytes.flower.messages import decoded, read_content, sealed, write_content
from fewbytes.flower.node import DATA, Order
from fewbytes.flower.private.errors import NODE_UNAVAILABLE
from fewbytes.flower.private.messages import failed, in_no_task
from fewbytes.mailbox.server import Member, ServerMailbox

ASKED = ".asked"  # the ending of files with what was asked
PREFIX = "mailbox "
"""How the ids of orders by mailbox begin."""


class Sent(msgspec.Struct, array_like=True):
    """The content of an order: what a connected node is sent, and the settings of the run."""

    kind: str  # of the message, as for connected nodes
    group: str
    order: bytes
    frame: bytes
    settings: dict[str, Any]


class Returned(msgspec.Struct, array_like=True):
    """The content of an answer: what a connected node answers."""

    answer: bytes
    frame: bytes = b""
    seal: bytes = b""


class Asked(msgspec.Struct, array_like=True):
    """What a server remembers of an order: a digest of what it asks, its receiver's key, its number, the order as it
    was sent, and the content of its answer, if that is kept: of numbers of samples, which a resumed run need not ask
    again."""

    what: bytes
    key: str
    number: int
    order: bytes
    answer: bytes = b""


@dataclass(frozen=True)
class ByMailbox:
    """The members that are reached by mailbox: the server's side of it, a function that returns them by the registered
    names of their nodes, and the run's settings, which each order carries."""

    mailbox: ServerMailbox
    members: Callable[[], Mapping[str, Member]]
    settings: Mapping[str, Any]


class MailboxLink(Link):
    """A link whose nodes are members that are reached by mailbox. They count as connected as long as they are
    members. `grid`: of other nodes, which are connected (None: there are none)."""

    def __init__(self, by: ByMailbox, grid: Grid | None, exchange: Exchange, patience: float) -> None:
        super().__init__(grid, exchange, patience)
        in_no_task()
        self._by, self._numbers = by, dict[str, int]()  # of names
        self._members: dict[int, Member] = {}
        self._sent: dict[int, tuple[int, Member]] = {}  # the receivers of open orders, by their numbers
        self._asked: dict[int, tuple[Asked, bytes]] = {}  # open orders, and as they are asked now
        self._earlier = {each.what: each for each in map(_read_asked, self._folder.glob(f"*{ASKED}")) if each}
        self._ending = False  # the run is interrupted: open orders stay for its resumption

    @property
    def _folder(self) -> Path:
        return self._by.mailbox.folder

    def nodes(self) -> dict[int, str]:
        """The members, by numbers that are used nowhere else, and the other nodes that are connected."""
        names = self._look()
        online = {} if self.grid is None else super().nodes()
        return {node: name for node, name in online.items() if name not in names.values()} | names

    def _look(self) -> dict[int, str]:
        """The names of the nodes that files reach now, by number."""
        members = self._by.members()
        for name, member in members.items():
            if name not in self._numbers:
                self._by.mailbox.prepare(member)
                self._numbers[name] = -1 - len(self._numbers)
        self._members = {self._numbers[name]: member for name, member in members.items()}
        return {self._numbers[name]: name for name in members}

    def push(self, kind: str, node: int, content: RecordDict, group: int) -> str | None:
        """Write an order; its id names its number."""
        if node not in self._members:
            return super().push(kind, node, content, group)
        member, mailbox = self._members[node], self._by.mailbox
        order, frame = read_content(content)
        what = _digest(kind, member, order, frame)
        known = self._earlier.pop(what, None)
        if known is None or known.key != member.key or not (known.answer or mailbox.reopen(known.number, member)):
            packed = msgspec.msgpack.encode(Sent(kind, str(group), order, bytes(frame), dict(self._by.settings)))
            if (number := mailbox.send(member, packed)) is None:
                return None
            known = Asked(what, member.key, number, order)
            self._remember(known)
        self._sent[known.number], self._asked[known.number] = (node, member), (known, order)
        return f"{PREFIX}{known.number}"

    def _remember(self, asked: Asked) -> None:
        with replacing(self._folder / f"{asked.number:06d}{ASKED}") as file:
            file.write(msgspec.msgpack.encode(asked))

    def pull(self, ids: Sequence[str]) -> dict[str, Message]:
        """The answers that have arrived; an error for orders to members that were removed or have another key since."""
        wanted = {int(each.removeprefix(PREFIX)): each for each in ids if each.startswith(PREFIX)}
        online = [each for each in ids if not each.startswith(PREFIX)]
        found = super().pull(online) if online else {}
        if not wanted:
            return found
        self._look()
        gone = [number for number in wanted if self._is_void(number)]
        found |= {wanted[number]: failed(_empty(), Error(NODE_UNAVAILABLE, "")) for number in gone}
        came = {n: self._asked[n][0].answer for n in wanted.keys() - set(gone) if self._asked[n][0].answer}
        came |= self._by.mailbox.answers(wanted.keys() - set(gone) - came.keys())
        for number, content in came.items():
            asked, order = self._asked[number]
            if decoded(order, Order).job.handler == DATA and not asked.answer:
                asked.answer = content
                self._remember(asked)
        return found | {wanted[n]: _message(content, *self._asked[n]) for n, content in came.items()}

    def wait(self, seconds: float | None = None) -> None:
        """As in `Link`."""
        try:
            super().wait(seconds)
        except BaseException:
            self._ending = True
            raise

    def _is_void(self, number: int) -> bool:
        """Whether an order's receiver is no longer a member, or has another key."""
        node, member = self._sent[number]
        return self._members.get(node) != member

    def forget(self, number: str) -> None:
        """Withdraw an order that was not answered."""
        if number.startswith(PREFIX):
            order = int(number.removeprefix(PREFIX))
            self._sent.pop(order, None)
            asked, _ = self._asked.pop(order, (None, b""))
            if self._ending:
                return
            if asked is not None and not asked.answer:
                (self._folder / f"{order:06d}{ASKED}").unlink(missing_ok=True)
            self._by.mailbox.forget(order)
        else:
            super().forget(number)


def _digest(kind: str, member: Member, order: bytes, frame: memoryview) -> bytes:
    """16 bytes that are equal for orders that ask a member for the same, whichever their numbers."""
    asked = decoded(order, Order)
    parts = [(part.handler, part.length, part.kind) for part in asked.job.parts]
    job = msgspec.structs.replace(asked.job, number=0, waited=[], origin=None, message=None)
    same = msgspec.structs.replace(asked, job=job, kept=0)
    return blake3(msgspec.msgpack.encode((kind, member.name, same, parts)) + frame).digest()[:16]


def _read_asked(path: Path) -> Asked | None:
    """A remembered order; None for a damaged file."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Asked)
    except (OSError, msgspec.MsgspecError):
        return None


def _message(content: bytes, asked: Asked, order: bytes) -> Message:
    """The message that a connected node would have answered with to the `order`, which is `asked` again; an empty one
    in place of an unreadable one."""
    try:
        returned = decoded(content, Returned)
    except FrameError:
        return _empty()
    seal, whole = returned.seal, (returned.answer, returned.frame)
    if seal == sealed(asked.order, *whole):
        seal = sealed(order, *whole)
    return Message(write_content(*whole, seal=seal), 0, "query.answer")


def _empty() -> Message:
    return Message(RecordDict(), 0, "query.answer")
