"""The calls of Flower's Fleet API by which a node of our own gets messages and sends replies, a request each.

A request raises httpx.HTTPStatusError where the SuperLink refuses it (`reason` reads why), httpx.RequestError where it
does not answer, and ValueError for an answer that is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.config import get_fused_config_from_fab
from flwr.common.serde import fab_from_proto, message_to_proto, run_from_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PushObjectRequest
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
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fewbytes.flower.private.grid import LOOK_SECONDS

SOON = 0.02  # seconds between first looks for the rest of a message that is still being left


class Announced(NamedTuple):
    """A message that waits at the SuperLink: its run, and the tree of the objects it consists of."""

    run: int
    tree: ObjectTree


class Reply(NamedTuple):
    """A reply as it is sent: without its content, the tree of its objects, and the objects by their ids."""

    head: Any
    tree: ObjectTree
    objects: Mapping[str, Any]


class _Counting:
    """Calls `moved` with the bytes of each request that is answered, and of its answer."""

    def __init__(self, moved: Callable[[int, int], None]) -> None:
        self._moved = moved

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        """Send a request."""
        response = call_next(context)
        self._moved(*(int(each.headers.get("content-length", 0)) for each in (context.request, response)))
        return response


def connect(
    superlink: str, certificate: bytes, key: EllipticCurvePrivateKey, moved: Callable[[int, int], None]
) -> FleetHttpClient:
    """A client of the SuperLink at host:port, whose requests are signed with a node's key; nothing is sent yet.
    `moved`: is called with the bytes of each request and its answer.

    Raises OSError or ValueError for what is not a certificate.
    """
    signing: list[Any] = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(key, key.public_key()),
        _Counting(moved),
    ]
    return FleetHttpClient.from_server_address(superlink, False, certificate, interceptors=signing)


def sign(request: Any, key: EllipticCurvePrivateKey) -> None:
    """Sign a request of httpx with a node's key, as requests to the Fleet API are."""
    NodeAuthHttpInterceptor(key, key.public_key()).intercept(
        ProtobufRequestContext("", Node(), request), lambda context: httpx.Response(200, request=context.request)
    )


def node_of(number: int) -> Node:
    """The node of that number. Raises ValueError for a number that none has."""
    return Node(node_id=number)


def activate(client: FleetHttpClient, key: EllipticCurvePrivateKey, seconds: float) -> Node:
    """Connect as one of the SuperLink's nodes, with a heartbeat interval in seconds."""
    public = public_key_to_bytes(key.public_key())
    return node_of(client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=seconds)).node_id)


def deactivate(client: FleetHttpClient, node: Node) -> None:
    """Disconnect the node."""
    client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))


def sign_of_life(client: FleetHttpClient, node: Node, seconds: float) -> bool:
    """Send a heartbeat; returns whether the SuperLink knows the node."""
    return bool(client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=node, heartbeat_interval=seconds)).success)


def next_message(client: FleetHttpClient, node: Node) -> Announced | None:
    """The next message for the node, if there is one."""
    answer = client.PullMessages(PullMessagesRequest(node=node))
    if not answer.messages_list:
        return None
    return Announced(answer.messages_list[0].metadata.run_id, answer.message_object_trees[0])


def pull_object(client: FleetHttpClient, request: Any) -> Any:
    """An object of a message, as `fetch` requests it."""
    return client.PullObject(request)


def fetch(pulled: Callable[[Any], Any], node: Node, announced: Announced) -> Message | None:
    """Fetch a message's objects, polling for those not uploaded yet; None if they are gone. `pulled`: the answer to a
    request of `pull_object`."""
    pull = make_pull_object_fn_protobuf(pulled, node, announced.run)
    try:
        message = pull_and_inflate_object_from_tree(
            announced.tree, pull, lambda _: None, return_type=Message,
            max_tries_per_object=None, initial_backoff=SOON, backoff_cap=LOOK_SECONDS,
        )  # fmt: skip
    except ObjectPullError:
        return None
    message.metadata.__dict__["_message_id"] = announced.tree.object_id
    return message


def confirm(client: FleetHttpClient, node: Node, run: int, message: str) -> None:
    """Confirm the message of that id, so that it is not sent again."""
    client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=message))


def get_run(client: FleetHttpClient, node: Node, run: int) -> Any:
    """Flower's data of a run."""
    return run_from_proto(client.GetRun(GetRunRequest(node=node, run_id=run)).run)


def get_bundle(client: FleetHttpClient, node: Node, run: int, about: Any) -> bytes:
    """The bundle of the application that a run was submitted with."""
    return fab_from_proto(client.GetFab(GetFabRequest(node=node, hash_str=about.fab_hash, run_id=run)).fab).content


def context(node: Node, run: int, about: Any, bundle: bytes, node_config: Mapping[str, Any]) -> Context:
    """The context of a client app for a message of the run."""
    return Context(
        run_id=run, node_id=node.node_id, node_config=dict(node_config), state=RecordDict(),
        run_config=get_fused_config_from_fab(bundle, about), series_id=about.series_id,
    )  # fmt: skip


def taken_apart(reply: Message, asked: Message) -> Reply:
    """A reply to a message, split into pieces to send; equal replies have equal ids."""
    metadata = reply.metadata.__dict__
    metadata.update(_created_at=asked.metadata.created_at, _ttl=asked.metadata.ttl)
    metadata["_message_id"] = reply.object_id
    with no_object_id_recompute():
        head = message_to_proto(remove_content_from_message(reply))
        return Reply(head, get_object_tree(reply), get_all_nested_objects(reply))


def push(client: FleetHttpClient, node: Node, reply: Reply, seconds: float) -> tuple[set[str], str]:
    """Announce a reply, computed in `seconds`; returns the objects that the SuperLink lacks, and its upload session."""
    request = PushMessagesRequest(
        node=node, messages_list=[reply.head], message_object_trees=[reply.tree], clientapp_runtime_list=[seconds]
    )
    answer = client.PushMessages(request)
    return set(answer.objects_to_push), answer.session_id


def push_object(client: FleetHttpClient, node: Node, run: int, name: str, piece: Any, session: str) -> bool:
    """Send an object of a reply; returns whether the SuperLink accepted it. `session`: empty for any waiting for it."""
    request = PushObjectRequest(
        node=node, run_id=run, object_id=name, object_content=piece.deflate(), session_id=session
    )
    return bool(client.PushObject(request).stored)


def reason(text: str) -> str:
    """Why the SuperLink refused a request, by its answer's text; empty, or ValueError, if that is not Flower's."""
    error = FlowerError.from_json(text)
    return "" if error is None else error.public_details or error.message
