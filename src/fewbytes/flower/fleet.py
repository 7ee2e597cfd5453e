"""The connection of a resident node: Flower's Fleet API as a registered node speaks it, over links that break.

As `fewbytes.flower.compat`, this is what the package takes for granted of Flower beyond its public interface;
`tests/flower/test_compat.py` tells which version has changed it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.config import get_fused_config_from_fab
from flwr.common.serde import fab_from_proto, message_from_proto, message_to_proto, run_from_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_and_inflate_object_from_tree
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fewbytes.base.errors import FewbytesError, UserError, cleaned, one_line
from fewbytes.base.files import replacing
from fewbytes.flower.compat import LOOK_SECONDS

ALIVE_SECONDS = 30.0  # between signs of life; Flower takes a node for gone that has given none for twice as long
FASTEST, SLOWEST = 0.1, 4.0  # seconds between looks for a message: 4 s are 300 B/s with the signs of life
SOON = 0.02  # seconds between first looks for the rest of a message that is still being left
AGAIN_SECONDS = 10.0  # at most between attempts to reach a SuperLink that does not answer
ATTEMPTS = 5  # to deliver a reply whose upload Flower has given up
AT_ONCE = 2  # pieces of a reply that are on their way
FAILURES = 5  # of the SuperLink itself at one request, as when it was started anew and has never heard of the run
WHY = {
    401: "it does not know this node's key, or one of both clocks is minutes wrong",
    412: "this node is not registered there, or was connected until a minute ago",
}
"""What statuses mean that Flower has no words for."""

Request = TypeVar("Request")
Response = TypeVar("Response")


class Refused(FewbytesError):
    """The SuperLink answers, but does not take this node for one of its own (yet)."""


class RunOver(FewbytesError):
    """What was asked, or is answered, belongs to a run that is over."""


class Stopped(Exception):
    """The node is to end."""


class Received(NamedTuple):
    """A message, and what it is made of."""

    message: Message
    tree: ObjectTree


class Fleet:
    """A registered node's connection to its SuperLink. It waits, tries again and goes on where it was; whatever it
    waits for, `stop` ends it with Stopped.

    `superlink`: host:port; `ca`: the certificate that proves it; `key`: the file of the node's private key; `memory`:
    a file in which the node's number is kept, so that it is known again at once; `say`: hears in a line what it waits
    for. Raises UserError for a key or a certificate that cannot be read.
    """

    def __init__(
        self, superlink: str, ca: Path, key: Path, memory: Path, say: Callable[[str], None], stop: threading.Event
    ) -> None:
        private = _private(key)
        self._public = public_key_to_bytes(private.public_key())
        who: list[Any] = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(private, private.public_key()),
        ]
        try:
            self._client = FleetHttpClient.from_server_address(superlink, False, ca.read_bytes(), interceptors=who)
        except (OSError, ValueError) as error:
            raise UserError(f"{ca}: not the certificate of a SuperLink: {one_line(error)}") from None
        self._heard = False  # whether the SuperLink has ever answered
        self._superlink, self._memory, self._say, self._stop = superlink, memory, say, stop
        self._node: Any = None
        with suppress(OSError, ValueError):
            self._node = Node(node_id=int(memory.read_text()))
        self._runs: dict[int, tuple[Any, bytes]] = {}
        self._signs: threading.Thread | None = None

    def connect(self) -> None:
        """Be one of the SuperLink's nodes: wait until it is there, and until this node is registered.

        A node that ended without a word is still taken for connected, and refused for a minute if it asks as a new one
        does; a sign of life, of who has its key and knows its number, is enough.
        """
        wait, told = 0.2, False
        while True:
            try:
                if self._node is not None and self._alive():
                    break
                request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=ALIVE_SECONDS)
                self._node = Node(node_id=self._ask(self._client.ActivateNode, request).node_id)
                with suppress(OSError), replacing(self._memory) as file:  # where nothing can be kept, a minute is lost
                    file.write(str(self._node.node_id).encode())
                break
            except Refused as refused:
                if self._node is not None:  # by a SuperLink that has given it no number yet, or another
                    self._node = None
                    continue
                if not told:
                    self._say(f"waiting: the SuperLink at {self._superlink} does not take this node yet: {refused}")
                told = True
            self.wait(wait)
            wait = min(2 * wait, SLOWEST)
        self._say(f"connected to {self._superlink}")
        if self._signs is None:
            self._signs = threading.Thread(target=self._stay_alive, daemon=True)
            self._signs.start()

    def wait(self, seconds: float) -> None:
        """Wait so long. Raises Stopped."""
        if self._stop.wait(seconds):
            raise Stopped

    def receive(self) -> Received:
        """The next message, as soon as there is one. Raises Refused by a SuperLink that knows this node no more.

        A SuperLink that `fewbytes` starts answers when there is a message (`fewbytes.flower.held`); another at once,
        so that it is asked ever less often while there is none.
        """
        pause = FASTEST
        while True:
            asked = time.monotonic()
            answer = self._ask(self._client.PullMessages, PullMessagesRequest(node=self._node))
            if answer.messages_list:
                with suppress(RunOver, ObjectPullError):
                    return self._whole(message_from_proto(answer.messages_list[0]), answer.message_object_trees[0])
                self._confirm(answer.messages_list[0].metadata.run_id, answer.message_object_trees[0].object_id)
                continue
            self.wait(max(0.0, pause - (time.monotonic() - asked)))
            pause = min(2 * pause, SLOWEST)

    def _whole(self, head: Message, tree: ObjectTree) -> Received:
        run = head.metadata.run_id
        pull = make_pull_object_fn_protobuf(
            lambda request: self._ask(self._client.PullObject, request), self._node, run
        )
        message = pull_and_inflate_object_from_tree(
            tree, pull, lambda _: None, return_type=Message,
            max_tries_per_object=None, initial_backoff=SOON, backoff_cap=LOOK_SECONDS,
        )  # fmt: skip
        message.metadata.__dict__["_message_id"] = tree.object_id
        return Received(message, tree)

    def application(self, run: int) -> bytes:
        """The bundle of the application that a run was submitted with. Raises RunOver, Refused."""
        if run not in self._runs:
            about = run_from_proto(self._ask(self._client.GetRun, GetRunRequest(node=self._node, run_id=run)).run)
            request = GetFabRequest(node=self._node, hash_str=about.fab_hash, run_id=run)
            self._runs = {run: (about, fab_from_proto(self._ask(self._client.GetFab, request).fab).content)}
        return self._runs[run][1]

    def context(self, run: int, node_config: Mapping[str, Any]) -> Context:
        """What a client app is told beside a message. Raises RunOver, Refused."""
        bundle = self.application(run)
        about = self._runs[run][0]
        return Context(
            run_id=run, node_id=self._node.node_id, node_config=dict(node_config), state=RecordDict(),
            run_config=get_fused_config_from_fab(bundle, about), series_id=about.series_id,
        )  # fmt: skip

    def answer(self, received: Received, reply: Message, seconds: float) -> None:
        """Send the reply to a message, which took so long, and say that the message need not be given again.

        A reply is sent in pieces, always in the same order; the SuperLink says which it does not have yet, also after
        this node was started anew and sends the same reply again. Raises Refused.
        """
        asked = received.message.metadata
        reply.metadata.__dict__.update(_created_at=asked.created_at, _ttl=asked.ttl)  # sent again, it is the same
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with suppress(RunOver), no_object_id_recompute():
            head = message_to_proto(remove_content_from_message(reply))
            tree, objects = get_object_tree(reply), get_all_nested_objects(reply)
            request = PushMessagesRequest(
                node=self._node, messages_list=[head], message_object_trees=[tree], clientapp_runtime_list=[seconds]
            )
            pieces, tries = objects, 0
            while tries < ATTEMPTS:
                answer = self._ask(self._client.PushMessages, request)
                if not (missing := set(answer.objects_to_push)):
                    self._send_rest(asked.run_id, objects)
                    break
                tries = tries + 1 if len(missing) == len(pieces) else 0
                pieces = {name: piece for name, piece in objects.items() if name in missing}
                if self._sent(asked.run_id, answer.session_id, pieces):
                    break
        self.confirm(received)

    def confirm(self, received: Received) -> None:
        """Say that a message need not be given again. Raises Refused."""
        self._confirm(received.message.metadata.run_id, received.tree.object_id)

    def _sent(self, run: int, session: str, pieces: Mapping[str, Any]) -> bool:
        """Send the pieces, AT_ONCE at a time, until one is refused; whether each has been taken for certain."""
        certain = True
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for taken in pool.map(lambda name: self._taken(run, session, name, pieces[name]), pieces):
                certain = certain and taken is True
                if taken is False:  # and so would all others be: the session is over
                    break
        return certain

    def _send_rest(self, run: int, pieces: Mapping[str, Any]) -> None:
        """Send what the SuperLink lacks of a reply of which it says that it lacks nothing: so it says, too, of one that
        has begun to come, for the run has heard of it already, and waits for the rest. That is the last pieces."""
        refused = 0
        for name in reversed([*pieces]):
            refused = refused + 1 if self._taken(run, "", name, pieces[name]) is False else 0
            if refused == AT_ONCE:  # those before have arrived, or nobody waits for any
                break

    def _taken(self, run: int, session: str, name: str, piece: Any) -> bool | None:
        """Send a piece; whether the SuperLink has taken it, or None where it was refused when it was sent again, for an
        answer was lost: it may have been taken before. `session`: empty for any that waits for it."""
        request = PushObjectRequest(
            node=self._node, run_id=run, object_id=name, object_content=piece.deflate(), session_id=session
        )
        sent = 0

        def send(request: PushObjectRequest) -> PushObjectResponse:
            nonlocal sent
            sent += 1
            return self._client.PushObject(request)

        return bool(self._ask(send, request).stored) or (None if sent > 1 else False)

    def _confirm(self, run: int, message: str) -> None:
        request = ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=message)
        with suppress(RunOver):
            self._ask(self._client.ConfirmMessageReceived, request)

    def leave(self) -> None:
        """Say that this node goes, if the SuperLink is there to hear it."""
        with suppress(httpx.HTTPError, RuntimeError):
            if self._node is not None:
                self._say("goes, as it was told to")
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))

    def _alive(self) -> bool:
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=ALIVE_SECONDS)
        return bool(self._ask(self._client.SendNodeHeartbeat, request).success)

    def _stay_alive(self) -> None:
        """Give signs of life until the node ends; who asks for messages finds out what is wrong, and says it."""
        request = SendNodeHeartbeatRequest(heartbeat_interval=ALIVE_SECONDS)
        pause = ALIVE_SECONDS * 0.8
        while not self._stop.wait(pause):
            pause = FASTEST
            with suppress(httpx.HTTPError, RuntimeError, ValueError):
                if self._node is not None:
                    request.node.CopyFrom(self._node)
                    self._client.SendNodeHeartbeat(request)
                    pause = ALIVE_SECONDS * 0.8
            pause = max(pause, SLOWEST)

    def _ask(self, call: Callable[[Request], Response], request: Request) -> Response:
        """What the SuperLink answers, as soon as it does. Raises Refused, RunOver, Stopped; UserError if what answers
        first is another than the certificate says."""
        wait, since, told, failed = FASTEST, time.monotonic(), False, 0
        while not self._stop.is_set():
            try:
                answer = call(request)
                self._heard = True
                if told:
                    self._say(f"the SuperLink at {self._superlink} answers again")
                return answer
            except httpx.HTTPStatusError as error:
                status, said = error.response.status_code, _said(error)
                if status == httpx.codes.FORBIDDEN and said:
                    raise RunOver(said) from None
                why = WHY.get(status) or said or f"HTTP status {status}"
                failed += status == httpx.codes.INTERNAL_SERVER_ERROR
                wait = FASTEST if failed == 1 else wait  # it is there again, however long it was not
                if status < 500 or failed == FAILURES:
                    raise Refused(why) from None
            except (httpx.RequestError, ValueError) as error:  # the second: an answer that says nothing
                why = one_line(error)
                if "certificate" in why.lower() and not self._heard:
                    raise UserError(f"the SuperLink at {self._superlink} is not who ca says: {why}") from None
            if not told and time.monotonic() - since + wait > SLOWEST / 2:
                after = "goes on when it does; if the run is over, Ctrl-C ends this node"
                self._say(f"waiting: the SuperLink at {self._superlink} does not answer ({why}): {after}")
                told = True
            self.wait(wait * random.uniform(0.5, 1.5))  # nodes that lost it together do not come back together
            wait = min(2 * wait, AGAIN_SECONDS)
        raise Stopped


def _private(key: Path) -> EllipticCurvePrivateKey:
    """A node's private key. Raises UserError for a file that holds none."""
    try:
        private = load_ssh_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{key}: not a node's private key: {one_line(error)}") from None
    if not isinstance(private, EllipticCurvePrivateKey):
        raise UserError(f"{key}: not a node's private key: it is of another kind than Flower's nodes have")
    return private


def _said(error: httpx.HTTPStatusError) -> str:
    """Why the SuperLink refused a request, in its words; empty if they are not Flower's."""
    with suppress(ValueError, httpx.HTTPError):
        if (said := FlowerError.from_json(error.response.text)) is not None:
            return cleaned(said.public_details or said.message)
    return ""
