"""Requests at the SuperLink's port: their paths and bodies."""

from __future__ import annotations

from typing import Any

from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from google.protobuf.message import DecodeError

FLEET = "/v1/fleet/"
"""Nodes use only paths below this; the others are for users and the SuperLink's own processes."""
ASKED, CONFIRMED, LEFT = f"{FLEET}pull-messages", f"{FLEET}confirm-message-received", "/v1/runtime/push-messages"
"""The paths by which a node asks for messages, a node confirms one, and a run sends messages."""
REMOVED = "/v1/control/unregister-node"
"""The path by which a node is removed."""


def node_of(body: bytes) -> int:
    """The node that asks for messages. Raises ValueError for a malformed body."""
    return int(_parsed(PullMessagesRequest, body).node.node_id)


def message_in(body: bytes) -> str:
    """The id of an answer's message; empty for none."""
    trees = _parsed(PullMessagesResponse, body).message_object_trees
    return str(trees[0].object_id) if trees else ""


def confirmed(body: bytes) -> tuple[int, str]:
    """The node, and the message that it confirms. Raises ValueError for a malformed body."""
    request = _parsed(ConfirmMessageReceivedRequest, body)
    return int(request.node.node_id), str(request.message_object_id)


def nodes_for(body: bytes) -> list[int]:
    """The nodes to which a run sends messages. Raises ValueError for a malformed body."""
    return [each.metadata.dst_node_id for each in _parsed(PushAppMessagesRequest, body).messages_list]


def _parsed(kind: Any, body: bytes) -> Any:
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise ValueError(str(error)) from None
