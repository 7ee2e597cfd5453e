"""Flower's SuperLink with some of its parts replaced, and whether a request to it comes from a registered node."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from flwr.common.constant import ACCESS_TOKEN_KEY
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, NodeStatus
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli import flower_superlink
from flwr.superlink.dependencies.linkstate import get_linkstate
from flwr.superlink.routers.fleet.node_auth import authenticate_node
from starlette.middleware import Middleware
from starlette.requests import Request

from fewbytes.flower import listening
from fewbytes.flower.answering import KNOWN, REMOVED, UNKNOWN
from fewbytes.flower.private import replaced
from fewbytes.flower.private.programs import GUARDED

START_SECONDS = 180


def run_superlink(
    secret: Path, local: str, gate: Callable[..., Any], knows: Callable[[str | bytes | None], bool], many: bool = False
) -> None:
    """`flower-superlink`, its ASGI application within `gate(app)`; it obeys commands that come with a token `knows`
    knows.

    The processes that carry out its tasks show it what the file `secret` holds, and reach it at the address `local`.
    Raises AttributeError where Flower has changed, rather than run without.
    """

    class OneAccount(NoOpControlAuthnPlugin):
        """The one account there is, for commands that come with the token."""

        def validate_tokens_in_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[bool, Any]:
            if not knows(dict(metadata).get(ACCESS_TOKEN_KEY)):
                return False, None
            return super().validate_tokens_in_metadata(metadata)

        def refresh_tokens(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[Any, Any]:
            return None, None

    def gated(app: Callable[..., Any]) -> Callable[..., Any]:
        inner = gate(app)

        async def serve(scope: dict[str, Any], receive: Any, send: Any) -> None:
            if "app" in scope:
                scope["app"].state.superexec_auth_secret = secret.read_bytes()
            await inner(scope, receive, send)

        return serve

    def with_secret(**options: Any) -> list[str]:
        launcher = starting(**{**options, "runtime_address": local})
        command = launcher if many else [sys.executable, *GUARDED, *launcher]
        return [*command, "--superexec-auth-secret-file", str(secret)]

    starting = replaced("flwr.superlink.cli.flower_superlink", "_get_superexec_command", with_secret)
    replaced("flwr.superlink.cli.flower_superlink", "load_control_authn_plugin", OneAccount)
    replaced("flwr.superlink.extensions", "get_middleware", lambda: (Middleware(gated),))
    replaced("uvicorn", "run", listening.run)
    be_patient()
    flower_superlink()


def be_patient() -> None:
    """Have a run's server START_SECONDS to start. After 30 s, the SuperLink would start another beside it, and refuse
    the first: on a slow machine, none would ever begin."""
    with suppress(ImportError, AttributeError):  # another version, which has its own patience
        replaced("flwr.supercore.corestate.sql_corestate", "HEARTBEAT_DEFAULT_INTERVAL", START_SECONDS)
    with suppress(ImportError, AttributeError):
        replaced("flwr.supercore.corestate.in_memory_corestate", "HEARTBEAT_DEFAULT_INTERVAL", START_SECONDS)


def is_node(scope: Mapping[str, Any]) -> bool:
    """Whether a request to the SuperLink is signed with the key of a registered node, by its headers alone."""
    request = Request({**scope, "state": {}})
    key = _signer(request)
    return key is not None and get_linkstate(request).get_node_id_by_public_key(key) is not None


def standing(scope: Mapping[str, Any]) -> int:
    """Whether a request is signed with a registered key (KNOWN), one that was removed (REMOVED), or neither (UNKNOWN).
    Only the owner of a removed key learns that it was."""
    if is_node(scope):
        return KNOWN
    request = Request({**scope, "state": {}})
    key = _signer(request)
    nodes = [] if key is None else get_linkstate(request).get_node_info(statuses=[NodeStatus.UNREGISTERED])
    return REMOVED if any(node.public_key == key for node in nodes) else UNKNOWN


def _signer(request: Request) -> bytes | None:
    """The public key with which a request was signed within the last minutes, by its headers."""
    try:
        key = base64.b64decode(request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        request.state.protobuf_request = ActivateNodeRequest(
            public_key=key
        )  # any message type that contains only the key
        authenticate_node(request)
    except (KeyError, ValueError, HTTPException):
        return None
    return key
