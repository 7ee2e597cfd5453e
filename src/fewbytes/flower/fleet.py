"""The connection of a resident node to its SuperLink, over unreliable links."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, Message

from fewbytes.base.errors import FewbytesError, UserError, cleaned, one_line
from fewbytes.base.files import replacing
from fewbytes.flower.private import calls
from fewbytes.running.node_status import NodeWatch

ALIVE_SECONDS = 30.0  # between heartbeats; Flower considers a node gone after twice as long without one
FASTEST, SLOWEST = 0.1, 4.0  # seconds between polls for a message: 4 s take 300 B/s with the heartbeats
AGAIN_SECONDS = 3.0  # maximum between attempts to reach a SuperLink that does not answer: a run waits for its nodes
ATTEMPTS = 5  # to deliver a reply whose upload Flower has given up
AT_ONCE = 2  # pieces of a reply in flight
FAILURES = 5  # internal errors of the SuperLink at one request, as after a restart, when it does not know the run
WHY = {
    401: "it does not know this node's key, or one of the two clocks is wrong by minutes",
    412: "this node is not registered there, or was connected until a minute ago",
}
"""The meaning of HTTP statuses that come without a reason."""

T = TypeVar("T")


class Refused(FewbytesError):
    """The SuperLink answers, but does not accept this node (yet)."""


class RunOver(FewbytesError):
    """The request or reply belongs to a run that has finished."""


class Stopped(Exception):
    """The node should end."""


class Fleet:
    """A registered node's connection to its SuperLink. It waits, retries and continues where it was; `stop` ends any
    wait with Stopped.

    `superlink`: host:port; `ca`: its CA certificate; `key`: the file of the node's private key, beside which another
    keeps the node's number, to reconnect at once; `say`: is called with a line about what it waits for; `watch`: keeps
    the node's status. Raises UserError for an unreadable key or certificate.
    """

    def __init__(
        self, superlink: str, ca: Path, key: Path, say: Callable[[str], None], watch: NodeWatch, stop: threading.Event
    ) -> None:
        self._key, self._ca, self._watch = private_key(key), ca, watch
        self.superlink = superlink
        self._client = self._connected(superlink)
        self._answered = False  # whether the SuperLink has ever answered
        self._told: set[str] = set()  # why it waits, each reason once until the SuperLink answers again
        self._memory, self._say, self._stop = key.with_name(f"{key.name}.number"), say, stop
        self._node: Any = None
        with suppress(OSError, ValueError):
            self._node = calls.node_of(int(self._memory.read_text()))
        self._runs: dict[int, tuple[Any, bytes]] = {}
        self._signs: threading.Thread | None = None

    def connect(self) -> None:
        """Connect: wait for the SuperLink, and until this node is registered.

        A node that crashed is still considered connected, and a new connection is refused for a minute; a heartbeat
        with its key and number is enough to continue.
        """
        wait, printed = 0.2, set[str]()
        while True:
            try:
                if self._node is not None and self._alive():
                    break
                self._node = self._ask(lambda: calls.activate(self._client, self._key, ALIVE_SECONDS))
                with suppress(OSError), replacing(self._memory) as file:  # where nothing can be kept, a minute is lost
                    file.write(str(self._node.node_id).encode())
                break
            except Refused as refused:
                if self._node is not None:  # this SuperLink has not assigned that number
                    self._node = None
                    continue
                self._watch.cut_off(str(refused))
                if str(refused) not in printed:
                    self._say(f"waiting: the SuperLink at {self.superlink} does not accept this node yet: {refused}")
                printed.add(str(refused))
            self.wait(wait)
            wait = min(2 * wait, SLOWEST)
        self._watch.connected()
        self._say(f"connected to {self.superlink}")
        if self._signs is None:
            self._signs = threading.Thread(target=self._stay_alive, daemon=True)
            self._signs.start()

    def move(self, superlink: str) -> None:
        """Reach the SuperLink at another address (host:port) from the next request on, which may be the next try of one
        that waits. Raises UserError for an unreadable certificate."""
        self._client, self.superlink = self._connected(superlink), superlink
        self._watch.follows(superlink)
        self._say(f"the server has moved to {superlink}, as this node's file says")

    def _connected(self, superlink: str) -> Any:
        try:
            return calls.connect(superlink, self._ca.read_bytes(), self._key, self._watch.moved)
        except (OSError, ValueError) as error:
            raise UserError(f"{self._ca}: not the certificate of a SuperLink: {one_line(error)}") from None

    def wait(self, seconds: float) -> None:
        """Wait for some seconds. Raises Stopped."""
        if self._stop.wait(seconds):
            raise Stopped

    def receive(self) -> Message:
        """The next message, as soon as there is one. Raises Refused by a SuperLink that no longer knows this node.

        A SuperLink that `fewbytes` starts answers when there is a message (long polling,
        `fewbytes.flower.long_polling`); others answer at once, and are polled less and less often."""
        pause = FASTEST
        while True:
            asked = time.monotonic()
            if (announced := self._ask(lambda: calls.next_message(self._client, self._node))) is not None:
                with suppress(RunOver):
                    message = calls.fetch(self._pulled, self._node, announced)
                    if message is not None:
                        return message
                self._confirm(announced.run, announced.tree.object_id)
                continue
            self.wait(max(0.0, pause - (time.monotonic() - asked)))
            pause = min(2 * pause, SLOWEST)

    def _pulled(self, request: Any) -> Any:
        return self._ask(lambda: calls.pull_object(self._client, request))

    def application(self, run: int) -> bytes:
        """The bundle of the application that a run was submitted with. Raises RunOver, Refused."""
        if run not in self._runs:
            about = self._ask(lambda: calls.get_run(self._client, self._node, run))
            bundle = self._ask(lambda: calls.get_bundle(self._client, self._node, run, about))
            self._runs = {run: (about, bundle)}
        return self._runs[run][1]

    def context(self, run: int, node_config: Mapping[str, Any]) -> Context:
        """The context of a client app for a message. Raises RunOver, Refused."""
        bundle = self.application(run)
        return calls.context(self._node, run, self._runs[run][0], bundle, node_config)

    def answer(self, message: Message, reply: Message, seconds: float) -> None:
        """Send the reply to a message, and confirm the message.

        A reply is sent in pieces, always in the same order; the SuperLink states which it lacks, also when this node
        was restarted and sends the same reply again. Raises Refused.
        """
        run, whole = message.metadata.run_id, calls.taken_apart(reply, message)
        with suppress(RunOver):
            pieces, tries = whole.objects, 0
            while tries < ATTEMPTS:
                missing, session = self._ask(lambda: calls.push(self._client, self._node, whole, seconds))
                if not missing:
                    self._send_rest(run, whole.objects)
                    break
                tries = tries + 1 if len(missing) == len(pieces) else 0
                pieces = {name: piece for name, piece in whole.objects.items() if name in missing}
                if self._sent(run, session, pieces):
                    break
        self.confirm(message)

    def confirm(self, message: Message) -> None:
        """Confirm a message, so that it is not sent again. Raises Refused."""
        self._confirm(message.metadata.run_id, message.metadata.message_id)

    def _sent(self, run: int, session: str, pieces: Mapping[str, Any]) -> bool:
        """Send the pieces, AT_ONCE at a time, until one is refused; returns whether each certainly arrived."""
        certain = True
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for taken in pool.map(lambda name: self._taken(run, session, name, pieces[name]), pieces):
                certain = certain and taken is True
                if taken is False:  # the session is over, and the others would be refused, too
                    break
        return certain

    def _send_rest(self, run: int, pieces: Mapping[str, Any]) -> None:
        """Send the last pieces of a reply although the SuperLink states that it lacks none. It states that, too, once a
        reply has begun to arrive, while the run waits for the rest."""
        refused = 0
        for name in reversed([*pieces]):
            refused = refused + 1 if self._taken(run, "", name, pieces[name]) is False else 0
            if refused == AT_ONCE:  # the earlier pieces have arrived, or no session waits for any
                break

    def _taken(self, run: int, session: str, name: str, piece: Any) -> bool | None:
        """Send a piece; returns whether the SuperLink took it, or None if it was refused on a retry after a lost answer
        and may have been taken before. `session`: empty for any that waits for it."""
        sent = 0

        def send() -> bool:
            nonlocal sent
            sent += 1
            return calls.push_object(self._client, self._node, run, name, piece, session)

        return self._ask(send) or (None if sent > 1 else False)

    def _confirm(self, run: int, message: str) -> None:
        with suppress(RunOver):
            self._ask(lambda: calls.confirm(self._client, self._node, run, message))

    def leave(self) -> None:
        """Disconnect, if the SuperLink is reachable."""
        with suppress(httpx.HTTPError, RuntimeError):
            if self._node is not None:
                self._say("stops, as requested")
                calls.deactivate(self._client, self._node)

    def _alive(self) -> bool:
        return self._ask(lambda: calls.sign_of_life(self._client, self._node, ALIVE_SECONDS))

    def _stay_alive(self) -> None:
        """Send heartbeats until the node ends; errors are reported by the requests for messages."""
        pause = ALIVE_SECONDS * 0.8
        while not self._stop.wait(pause):
            pause = FASTEST
            with suppress(httpx.HTTPError, RuntimeError, ValueError):
                if self._node is not None:
                    calls.sign_of_life(self._client, self._node, ALIVE_SECONDS)
                    pause = ALIVE_SECONDS * 0.8
            pause = max(pause, SLOWEST)

    def _ask(self, call: Callable[[], T]) -> T:
        """The result of `call`, as soon as the SuperLink answers. Raises Refused, RunOver, Stopped; UserError if the
        server does not match the certificate."""
        wait, since, failed = FASTEST, time.monotonic(), 0
        while not self._stop.is_set():
            try:
                answer = call()
                self._answered = True
                if self._told:
                    self._told.clear()
                    self._watch.connected()
                    self._say(f"contact with the SuperLink at {self.superlink} restored: it answers again")
                return answer
            except httpx.HTTPStatusError as error:
                status, reason = error.response.status_code, _reason(error)
                if status == httpx.codes.FORBIDDEN and reason:
                    raise RunOver(reason) from None
                why = WHY.get(status) or reason or f"HTTP status {status}"
                failed += status == httpx.codes.INTERNAL_SERVER_ERROR
                wait = FASTEST if failed == 1 else wait  # it is reachable again
                if status < 500 or failed == FAILURES:
                    raise Refused(why) from None
            except (httpx.RequestError, ValueError) as error:  # ValueError: an unreadable answer
                why = one_line(error)
                if "certificate" in why.lower():
                    if not self._answered:
                        raise UserError(f"the SuperLink at {self.superlink} does not match ca: {why}") from None
                    why = f"its certificate no longer matches ca in this node's file: {why}"
            if why not in self._told and time.monotonic() - since + wait > SLOWEST / 2:
                after = "retrying. If the run has finished, press Ctrl-C"
                self._watch.cut_off(f"it does not answer ({why})")
                self._say(f"waiting: the SuperLink at {self.superlink} does not answer ({why}); {after}")
                self._told.add(why)
            self.wait(wait * random.uniform(0.5, 1.5))  # so that nodes do not all reconnect at once
            wait = min(2 * wait, AGAIN_SECONDS)
        raise Stopped


def private_key(key: Path) -> EllipticCurvePrivateKey:
    """A node's private key. Raises UserError for another file."""
    try:
        private = load_ssh_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{key}: not a node's private key: {one_line(error)}") from None
    if not isinstance(private, EllipticCurvePrivateKey):
        raise UserError(f"{key}: not a node's private key: it has another type than Flower's nodes use")
    return private


def _reason(error: httpx.HTTPStatusError) -> str:
    """Flower's reason why the SuperLink refused a request; empty if the answer is not Flower's."""
    with suppress(ValueError, httpx.HTTPError):
        return cleaned(calls.reason(error.response.text))
    return ""
