"""Requests at the SuperLink's port: their paths, and what is in their bodies."""

from __future__ import annotations

from typing import Any

from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from google.protobuf.message import DecodeError

FLEET = "/v1/fleet/"
"""Below this path lies what nodes need of a SuperLink's port; the rest is for people and for its own processes."""
ASKED, CONFIRMED, LEFT = f"{FLEET}pull-messages", f"{FLEET}confirm-message-received", "/v1/runtime/push-messages"
"""The paths by which a node asks for messages, and says that it has one, and by which a run leaves messages."""


def node_of(body: bytes) -> int:
    """Which node asks for messages. Raises ValueError for a body that does not say."""
    return int(_parsed(PullMessagesRequest, body).node.node_id)


def message_in(body: bytes) -> str:
    """Which message an answer holds; empty for none."""
    trees = _parsed(PullMessagesResponse, body).message_object_trees
    return str(trees[0].object_id) if trees else ""


def confirmed(body: bytes) -> tuple[int, str]:
    """Which node confirms which message. Raises ValueError for a body that does not say."""
    request = _parsed(ConfirmMessageReceivedRequest, body)
    return int(request.node.node_id), str(request.message_object_id)


def nodes_for(body: bytes) -> list[int]:
    """For which nodes a run leaves messages. Raises ValueError for a body that does not say."""
    return [each.metadata.dst_node_id for each in _parsed(PushAppMessagesRequest, body).messages_list]


def _parsed(kind: Any, body: bytes) -> Any:
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise ValueError(str(error)) from None
