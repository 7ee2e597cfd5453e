"""Messages over a Flower grid: pushed, looked for, and waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fewbytes.engines.frames import FrameFolder

CLOCKS = 3700.0  # seconds: clocks that are an hour apart, or set back or on by one, end no message


@dataclass(frozen=True)
class Exchange:
    """How messages and replies are handed over.

    `poll`: seconds between looks for replies. `ahead`: clients asked at a time (default: all). `frame_folder`: where
    frames are handed over that need not travel. `stop`: ends the run as Ctrl-C does.
    """

    poll: float = 0.1
    ahead: int | None = None
    frame_folder: FrameFolder | None = None
    stop: threading.Event = field(default_factory=threading.Event)


class Link:
    """A grid whose messages are waited for so many seconds (`patience`)."""

    def __init__(self, grid: Grid, exchange: Exchange, patience: float) -> None:
        self.grid, self.exchange = grid, exchange
        self._patience = patience
        self._pushed: dict[str, float] = {}  # when messages were sent, by Flower's ids
        self._looked: set[str] = set()  # to what there was no reply yet at the last look
        self._elapsed: dict[str, float] = {}  # seconds until replies came, where that is known

    def push(self, kind: str, node: int, content: RecordDict, group: int) -> str | None:
        """Send a node a message, in a group of them; its id, or None if Flower does not take it."""
        ttl = self._patience + CLOCKS  # by Flower's clocks; our own, which never jumps, says who is late
        message = Message(content, node, kind, ttl=ttl, group_id=str(group))
        pushed = time.monotonic()
        number = next(iter(self.grid.push_messages([message])), None)
        if number is not None:
            self._pushed[number] = pushed
        return number

    def pull(self, ids: Sequence[str]) -> dict[str, Message]:
        """The replies that are there, by the ids of what they answer."""
        found = {m.metadata.reply_to_message_id: m for m in self.grid.pull_messages(ids)} if ids else {}
        now = time.monotonic()
        for number in found.keys() & self._looked:  # of what was not there at the last look it is known when it came
            self._elapsed[number] = now - self._pushed[number]
        self._looked = set(ids) - found.keys()
        return found

    def elapsed(self, number: str) -> float | None:
        """Seconds from a message to its reply, if that is known."""
        return self._elapsed.get(number)

    def forget(self, number: str) -> None:
        """Nobody waits for the reply to a message any more."""
        self._pushed.pop(number, None)
        self._elapsed.pop(number, None)

    def wait(self, seconds: float | None = None) -> None:
        """Wait for a while (default: until the next look). Raises KeyboardInterrupt where the run is to be stopped."""
        if self.exchange.stop.wait(self.exchange.poll if seconds is None else seconds):
            raise KeyboardInterrupt
