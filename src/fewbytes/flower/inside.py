"""What is put in the place of Flower's own inside its SuperLink and its SuperNode, and how their requests are read.

As with `fewbytes.flower.compat`, `tests/flower/test_compat.py` tells which version has changed it.
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbytes.flower.compat import replaced

if TYPE_CHECKING:
    from flwr.supercore.retry import RetryInvoker

FLEET = "/v1/fleet/"
"""Below this path lies what nodes need of a SuperLink's port; the rest is for people and for its own processes."""
ASKED, CONFIRMED, LEFT = f"{FLEET}pull-messages", f"{FLEET}confirm-message-received", "/v1/runtime/push-messages"
"""The paths by which a node asks for messages, and says that it has one, and by which a run leaves messages."""


def run_superlink(secret: Path, gate: Callable[..., Any], knows: Callable[[str | bytes | None], bool]) -> None:
    """`flower-superlink`, its application within `gate(app, FLEET, is_node)`; who sends a command must be one that
    `knows`.

    The processes that carry out its tasks show it what the file `secret` holds. Raises AttributeError where Flower
    has changed, rather than run without.
    """
    from flwr.common.constant import ACCESS_TOKEN_KEY
    from flwr.superlink import extensions
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
    from starlette.middleware import Middleware

    command = importlib.import_module("flwr.superlink.cli.flower_superlink")

    class OneAccount(NoOpControlAuthnPlugin):
        """The account there always is, for who shows the token."""

        def validate_tokens_in_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[bool, Any]:
            if not knows(dict(metadata).get(ACCESS_TOKEN_KEY)):
                return False, None
            return super().validate_tokens_in_metadata(metadata)

        def refresh_tokens(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[Any, Any]:
            return None, None

    def gated(app: Callable[..., Any]) -> Callable[..., Any]:
        inner = gate(app, FLEET, is_node)

        async def serve(scope: dict[str, Any], receive: Any, send: Any) -> None:
            if "app" in scope:
                scope["app"].state.superexec_auth_secret = secret.read_bytes()
            await inner(scope, receive, send)

        return serve

    def with_secret(*arguments: Any, **options: Any) -> list[str]:
        return [*starting(*arguments, **options), "--superexec-auth-secret-file", str(secret)]

    starting = replaced(command, "_get_superexec_command", with_secret)
    replaced(command, "load_control_authn_plugin", OneAccount)
    replaced(extensions, "get_middleware", lambda: (Middleware(gated),))
    command.flower_superlink()


def is_node(scope: Mapping[str, Any]) -> bool:
    """Whether a request to the SuperLink is signed with the key of a registered node, by its headers alone."""
    from fastapi import HTTPException
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
    from flwr.superlink.dependencies.linkstate import get_linkstate
    from flwr.superlink.routers.fleet.node_auth import authenticate_node
    from starlette.requests import Request

    request = Request({**scope, "state": {}})
    try:
        key = base64.b64decode(request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        request.state.protobuf_request = ActivateNodeRequest(public_key=key)  # any that claims no more than the key
        authenticate_node(request)
    except (KeyError, ValueError, HTTPException):
        return False
    return get_linkstate(request).get_node_id_by_public_key(key) is not None


def node_of(body: bytes) -> int:
    """Which node asks for messages. Raises ValueError for a body that does not say."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest

    return int(_parsed(PullMessagesRequest, body).node.node_id)


def message_in(body: bytes) -> str:
    """Which message an answer holds; empty for none."""
    from flwr.proto.fleet_pb2 import PullMessagesResponse

    trees = _parsed(PullMessagesResponse, body).message_object_trees
    return str(trees[0].object_id) if trees else ""


def confirmed(body: bytes) -> tuple[int, str]:
    """Which node confirms which message. Raises ValueError for a body that does not say."""
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

    said = _parsed(ConfirmMessageReceivedRequest, body)
    return int(said.node.node_id), str(said.message_object_id)


def nodes_for(body: bytes) -> list[int]:
    """For which nodes a run leaves messages. Raises ValueError for a body that does not say."""
    from flwr.proto.runtime_pb2 import PushAppMessagesRequest

    return [each.metadata.dst_node_id for each in _parsed(PushAppMessagesRequest, body).messages_list]


def _parsed(kind: Any, body: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise ValueError(str(error)) from None


def run_supernode(is_installed: Callable[[bytes], bool], application: str) -> None:
    """`flower-supernode` that runs only applications whose bundles are what is installed here, and bears bad links.

    `application`: by which name and version Flower finds again what a bundle unpacked to. Raises AttributeError where
    Flower has changed, rather than run without.
    """
    from flwr.supercore.constant import TaskType
    from flwr.supercore.fab import Fab

    module = importlib.import_module("flwr.supernode.start_client_internal")

    def pull(
        *, get_run: Callable[[int], Any], get_fab: Callable[[str, int], Fab], trusted_entities: object, **others: Any
    ) -> Any:
        runs: dict[int, Any] = {}

        def noted(number: int) -> Any:
            runs[number] = get_run(number)
            return runs[number]

        def checked(digest: str, number: int) -> Fab:
            fab, run = get_fab(digest, number), runs[number]
            is_named = f"{run.fab_id} {run.fab_version}" == application and run.primary_task_type != TaskType.AGENT_APP
            same = sha256(fab.content).hexdigest() == fab.hash_str == run.fab_hash
            ours = is_named and same and is_installed(fab.content)
            return Fab(fab.hash_str, fab.content, {"valid_license": "installed"} if ours else {})

        return pulling(get_run=noted, get_fab=checked, trusted_entities={"installed": ""}, **others)

    pulling = replaced(module, "_pull_and_store_message", pull)
    replaced(module, "_verify_fab", lambda fab, _: bool(fab.verifications))
    connection = importlib.import_module("flwr.supernode.fleet_http_connection")
    retrying = connection.make_simple_http_retry_invoker
    replaced(connection, "make_simple_http_retry_invoker", lambda: bearing_bad_links(retrying()))
    importlib.import_module("flwr.supernode.cli.flower_supernode").flower_supernode()


def bearing_bad_links(invoker: RetryInvoker) -> RetryInvoker:
    """What calls the SuperLink and tries again: also where a link broke off, or damaged, what TLS carries.

    Flower of itself tries again after other breaks, but takes these for a wrong certificate: the message that was
    being fetched is lost, and the server waits for its reply in vain.
    """
    import httpx

    gives_up = invoker.should_giveup

    def hopeless(error: Exception) -> bool:
        broken = isinstance(error, httpx.TransportError) and "certificate" not in str(error).lower()
        return not broken and gives_up is not None and gives_up(error)

    invoker.should_giveup = hopeless
    return invoker
