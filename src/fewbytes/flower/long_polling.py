"""Long polling for messages, and messages that are sent again until they are confirmed.

Flower's SuperLink answers a node's request for messages at once, mostly with none, and sends each message only once: a
lost answer loses the message. With `LongPolling`, the request waits until there is a message, and the last message is
sent again until the node confirms it. One request is held per registered node; other requests are answered at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

HOLD_SECONDS = 20.0
"""How long a request for messages is held: less than the timeouts of nodes and proxies."""
TIMES = 5
"""How often an unconfirmed message is sent."""
CONFIRMED_STATUSES = (200, 403)
"""The statuses of a confirmed message; the second: the message's run has finished."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class MessageRequests(Protocol):
    """The paths and bodies of requests about messages."""

    ASKED: str
    """The path of a node's requests for messages."""
    CONFIRMED: str
    """The path of a node's confirmations."""
    LEFT: str
    """The path by which a run sends messages to nodes."""
    REMOVED: str
    """The path by which a node is removed."""

    def node_of(self, body: bytes) -> int:
        """The node that asks for a message. Raises ValueError for a malformed body."""

    def message_in(self, body: bytes) -> str:
        """The id of an answer's message; empty for none."""

    def confirmed(self, body: bytes) -> tuple[int, str]:
        """The node, and the message that it confirms. Raises ValueError."""

    def nodes_for(self, body: bytes) -> list[int]:
        """The nodes to which messages are sent. Raises ValueError."""


class _Answer(NamedTuple):
    """An application's answer to one request."""

    start: MutableMapping[str, Any]
    body: bytes


@dataclass
class _Waiting:
    """A node's state. `come`: set and replaced when there is a message for it; `newer`: set when it asks again; `last`:
    the last answer with a `message`, which may be sent `times` more."""

    come: asyncio.Event = field(default_factory=asyncio.Event)
    newer: asyncio.Event = field(default_factory=asyncio.Event)
    last: _Answer | None = None
    message: str = ""
    times: int = 0

    def wake(self) -> None:
        """Wake the held request."""
        self.come.set()
        self.come = asyncio.Event()


class LongPolling:
    """An ASGI application that wraps `app`: requests for messages wait until there is one."""

    def __init__(self, app: Callable[..., Any], requests: MessageRequests) -> None:
        self.app, self.requests = app, requests
        self._nodes: dict[int, _Waiting] = {}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve a request."""
        path = scope.get("path")
        of = self.requests
        if scope["type"] != "http" or path not in (of.ASKED, of.CONFIRMED, of.LEFT, of.REMOVED):
            await self.app(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            return
        answer = await self._hold(scope, body, receive) if path == self.requests.ASKED else await self._run(scope, body)
        if answer is None:
            return
        with contextlib.suppress(ValueError):
            if path == self.requests.CONFIRMED and answer.start["status"] in CONFIRMED_STATUSES:
                node, message = self.requests.confirmed(body)
                if node in self._nodes and self._nodes[node].message == message:
                    self._nodes[node].last = None
            elif path == self.requests.LEFT:
                for number in self.requests.nodes_for(body):
                    if number in self._nodes:
                        self._nodes[number].wake()
            elif path == self.requests.REMOVED:  # a removed node learns so at once: each held request asks again
                for waiting in self._nodes.values():
                    waiting.wake()
        await send(answer.start)
        await send({"type": "http.response.body", "body": answer.body})

    async def _hold(self, scope: dict[str, Any], body: bytes, receive: Receive) -> _Answer | None:
        """The answer with a message, one without after HOLD_SECONDS, or None if the node has disconnected.

        The application checks each time whether the node may ask; if not, it is answered at once.
        """
        try:
            node = self.requests.node_of(body)
        except ValueError:
            return await self._run(scope, body)
        deadline, newer = time.monotonic() + HOLD_SECONDS, asyncio.Event()
        gone = asyncio.ensure_future(_gone(receive))
        try:
            while True:
                known = self._nodes.get(node)
                come = known.come if known is not None else None
                answer = await self._run(scope, body)
                if answer.start["status"] != 200:
                    return answer
                waiting = self._nodes.setdefault(node, _Waiting())  # only after the application accepted the node
                if message := self.requests.message_in(answer.body):
                    waiting.last, waiting.message, waiting.times = answer, message, TIMES - 1
                    waiting.wake()  # if this answer is lost, the next request gets the message
                    return answer
                if come is None:
                    continue
                if newer.is_set():
                    return answer
                if waiting.newer is not newer:  # a node has one request: an older one's connection is broken
                    waiting.newer.set()
                    waiting.newer = newer
                if waiting.last is not None and waiting.times:
                    waiting.times -= 1
                    return waiting.last
                left = deadline - time.monotonic()
                if left <= 0:
                    return answer
                ends = {gone, *(asyncio.ensure_future(event.wait()) for event in (come, newer))}
                try:
                    await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for end in ends - {gone}:
                        end.cancel()
                if gone.done():
                    return None
        finally:
            gone.cancel()

    async def _run(self, scope: dict[str, Any], body: bytes) -> _Answer:
        """The application's answer to a request with that body."""
        parts: list[bytes] = []
        start: MutableMapping[str, Any] = {}
        unread = True

        async def receive() -> MutableMapping[str, Any]:
            nonlocal unread
            if unread:
                unread = False
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.Event().wait()  # a listener for the end of the connection is cancelled
            raise AssertionError

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self.app({**scope, "state": dict(scope.get("state", {}))}, receive, send)
        return _Answer(start, b"".join(parts))


async def _body(receive: Receive) -> bytes | None:
    """All of a request's body; None if the sender disconnects before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _gone(receive: Receive) -> None:
    """Wait until the sender has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
