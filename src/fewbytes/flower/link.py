"""Messages over a Flower grid: pushed, polled, and waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fewbytes.engines.frames import FrameFolder
from fewbytes.flower.private.grid import connected_nodes

CLOCKS = 3700.0  # seconds, so that clocks that differ or change by an hour expire no message


@dataclass(frozen=True)
class Exchange:
    """How messages and replies are exchanged.

    `poll`: seconds between polls for replies. `ahead`: clients asked at a time (default: all). `frame_folder`: where
    processes of one host exchange frames. `stop`: ends the run as Ctrl-C does. `link`: opens another kind of link, with
    the arguments of `Link`. `vacant`: called for the names that no node may have now, as of members that have not
    joined yet or were removed.
    """

    poll: float = 0.1
    ahead: int | None = None
    frame_folder: FrameFolder | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    link: Callable[[Grid | None, Exchange, float], Link] | None = None
    vacant: Callable[[], Collection[str]] = tuple


class Link:
    """A grid whose replies are awaited for at most `patience` seconds. `grid`: None if no node is on one."""

    def __init__(self, grid: Grid | None, exchange: Exchange, patience: float) -> None:
        self.grid, self.exchange = grid, exchange
        self._patience = patience
        self._pushed: dict[str, float] = {}  # when messages were sent, by Flower's ids
        self._looked: set[str] = set()  # messages without a reply at the last poll
        self._elapsed: dict[str, float] = {}  # seconds until replies arrived, if known

    def nodes(self) -> dict[int, str]:
        """The nodes that are connected: their ids, and the names they are registered by (empty: none)."""
        return connected_nodes(self._connected)

    @property
    def _connected(self) -> Grid:
        assert self.grid is not None, "only a link by mailbox has no grid"
        return self.grid

    def push(self, kind: str, node: int, content: RecordDict, group: int) -> str | None:
        """Send a node a message of a group; returns its id, or None if Flower rejects it."""
        ttl = self._patience + CLOCKS  # by Flower's clocks; lateness is measured by our own, monotonic one
        message = Message(content, node, kind, ttl=ttl, group_id=str(group))
        pushed = time.monotonic()
        number = next(iter(self._connected.push_messages([message])), None)
        if number is not None:
            self._pushed[number] = pushed
        return number

    def pull(self, ids: Sequence[str]) -> dict[str, Message]:
        """The replies that have arrived, by the ids of the messages that they answer."""
        found = {m.metadata.reply_to_message_id: m for m in self._connected.pull_messages(ids)} if ids else {}
        now = time.monotonic()
        for number in found.keys() & self._looked:  # absent at the last poll, so its arrival time is known
            self._elapsed[number] = now - self._pushed[number]
        self._looked = set(ids) - found.keys()
        return found

    def elapsed(self, number: str) -> float | None:
        """Seconds from a message to its reply, if known."""
        return self._elapsed.get(number)

    def forget(self, number: str) -> None:
        """Stop waiting for the reply to a message."""
        self._pushed.pop(number, None)
        self._elapsed.pop(number, None)

    def wait(self, seconds: float | None = None) -> None:
        """Wait for some seconds (default: until the next poll). Raises KeyboardInterrupt if the run should stop."""
        if self.exchange.stop.wait(self.exchange.poll if seconds is None else seconds):
            raise KeyboardInterrupt
