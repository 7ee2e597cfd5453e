"""Nodes that are reached by files: orders and answers travel in a mailbox; all else is as with connected nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fewbytes.base.errors import FrameError
from fewbytes.flower.link import Exchange, Link
from fewbytes.flower.messages import decoded, read_content, write_content
from fewbytes.flower.private.errors import NODE_UNAVAILABLE
from fewbytes.flower.private.messages import failed, in_no_task
from fewbytes.mailbox.server import Member, ServerMailbox

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
        order, frame = read_content(content)
        packed = msgspec.msgpack.encode(Sent(kind, str(group), order, bytes(frame), dict(self._by.settings)))
        if (number := self._by.mailbox.send(self._members[node], packed)) is None:
            return None
        self._sent[number] = node, self._members[node]
        return f"{PREFIX}{number}"

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
        came = self._by.mailbox.answers(wanted.keys() - set(gone)).items()
        return found | {wanted[number]: _message(content) for number, content in came}

    def _is_void(self, number: int) -> bool:
        """Whether an order's receiver is no member any more, or has another key."""
        node, member = self._sent[number]
        return self._members.get(node) != member

    def forget(self, number: str) -> None:
        """Withdraw an order that was not answered."""
        if number.startswith(PREFIX):
            order = int(number.removeprefix(PREFIX))
            self._sent.pop(order, None)
            self._by.mailbox.forget(order)
        else:
            super().forget(number)


def _message(content: bytes) -> Message:
    """The message that a connected node would have answered with; an empty one in place of an unreadable one."""
    try:
        returned = decoded(content, Returned)
    except FrameError:
        return _empty()
    return Message(write_content(returned.answer, returned.frame, seal=returned.seal), 0, "query.answer")


def _empty() -> Message:
    return Message(RecordDict(), 0, "query.answer")
