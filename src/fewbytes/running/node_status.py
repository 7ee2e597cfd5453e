"""The status of a resident node: what its metrics and `fewbytes status` show. Needs no Flower and no torch."""

from __future__ import annotations

import threading
import time

import msgspec

SILENT_SECONDS = 120.0  # without contact, after which a node counts as cut off; heartbeats come every 24 s


class NodeStatus(msgspec.Struct):
    """The status of a node since its process started.

    `connected`: whether its SuperLink has accepted it; `why`: what it waits for. `contact`: when the SuperLink last
    answered, in seconds since 1970. `runs`: number of runs that it was asked in. `sent_bytes`, `received_bytes`: bodies
    of requests and answers. `refusals`: orders that the site's policy declined; `errors`: orders that failed.
    `training_seconds`: spent on orders of methods. `written`: when this was read.
    """

    name: str
    superlink: str
    connected: bool = False
    why: str = "it has not connected yet"
    contact: float | None = None
    runs: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    refusals: int = 0
    errors: int = 0
    training_seconds: float = 0.0
    written: float = 0.0

    def trouble(self) -> str:
        """What is wrong with the node, in one line; empty if it is healthy."""
        if not self.connected:
            return f"{self.name} is not connected to {self.superlink}: {self.why}"
        if self.contact is not None and self.written > self.contact + SILENT_SECONDS:
            return f"{self.name} has had no contact with {self.superlink} for {self.written - self.contact:.0f} s"
        return ""


class NodeWatch:
    """Keeps a node's status, from any of its threads."""

    def __init__(self, name: str, superlink: str) -> None:
        self.name, self._status = name, NodeStatus(name, superlink)
        self._lock, self._runs = threading.Lock(), set[int]()

    def read(self) -> NodeStatus:
        """The status now."""
        with self._lock:
            return msgspec.structs.replace(self._status, runs=len(self._runs), written=time.time())

    def connected(self) -> None:
        """The SuperLink has accepted the node."""
        with self._lock:
            self._status.connected, self._status.why = True, ""

    def follows(self, superlink: str) -> None:
        """The SuperLink is at another address, host:port."""
        with self._lock:
            self._status.superlink = superlink

    def cut_off(self, why: str) -> None:
        """The SuperLink does not answer, or does not accept the node."""
        with self._lock:
            self._status.connected, self._status.why = False, why

    def moved(self, sent: int, received: int) -> None:
        """A request was answered: bytes of both bodies."""
        with self._lock:
            self._status.sent_bytes += sent
            self._status.received_bytes += received
            self._status.contact = time.time()

    def answered(self, run: int, seconds: float, declined: bool, failed: bool) -> None:
        """An order of a run was answered; `seconds`: of training."""
        with self._lock:
            self._runs.add(run)
            self._status.training_seconds += seconds
            self._status.refusals += declined
            self._status.errors += failed and not declined
