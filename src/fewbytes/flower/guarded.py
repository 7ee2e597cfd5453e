"""Flower's SuperLink and SuperNode with additional access control, as `fewbytes deploy` starts them.

`python -m fewbytes.flower.guarded superlink TOKEN LOCAL …` is `flower-superlink …` that serves other machines only what
nodes need. It accepts long requests from registered nodes only, and commands only with the content of the file TOKEN;
programs of its machine reach it at the address LOCAL. It answers questions of `fewbytes check` to registered nodes.
`… guarded flower-superexec …`, which it starts, becomes the server of the run that is submitted; after `LOCAL many`,
Flower's own starts a server for each run.
`… guarded supernode …` is `flower-supernode …` that runs only the application installed with this package, whatever
its SuperLink sends. Flower's own check (`--trusted-entities`) accepts only signatures of Flower's hub, over a network.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fewbytes.flower.answering import Answering, body_length
from fewbytes.flower.application import APPLICATION, is_installed
from fewbytes.flower.long_polling import LongPolling
from fewbytes.flower.private.programs import LAUNCHER

STRANGERS_BYTES = 1 << 16  # maximum request body from anyone
NODES_BYTES = 1 << 26  # maximum request body from a node; Flower sends at most 21 MB of a model at once
HERE = ("/v1/control/", "/v1/runtime/")
"""Paths for requests of this machine, which need the token, or a secret derived from it."""


class Gate:
    """An ASGI application that forwards requests below `open_path` from all machines, and those in HERE from this one.
    Other paths of Flower's (/docs, /openapi.json) need no key, and are blocked for all.

    Below `open_path`, bodies above STRANGERS_BYTES are for nodes only, which `is_node` checks by the request's scope
    alone. Flower would read the whole body into memory before that check.
    """

    def __init__(self, app: Callable[..., Any], open_path: str, is_node: Callable[[dict[str, Any]], bool]) -> None:
        self.app, self.open_path, self.is_node = app, open_path, is_node

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Serve a request, or refuse it before any of its body is read."""
        if scope["type"] == "lifespan" or not (refused := await self._refused(scope)):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            status, why = refused
            await send({"type": "http.response.start", "status": status, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": why + b"\n"})
        else:
            await send({"type": "websocket.close"})

    async def _refused(self, scope: dict[str, Any]) -> tuple[int, bytes] | None:
        """The status and reason with which a request is refused; None if it is accepted."""
        if not scope["path"].startswith(self.open_path):
            if not _from_here(scope):
                return 403, b"from the SuperLink's own machine only"
            return None if scope["path"].startswith(HERE) else (404, b"not found")
        length = body_length(scope)
        if length > NODES_BYTES:
            return 413, b"too long"
        if length > STRANGERS_BYTES and not await asyncio.to_thread(self.is_node, scope):
            return 401, b"from registered nodes only"
        return None


def _from_here(scope: dict[str, Any]) -> bool:
    """Whether a request comes from this machine's loopback."""
    try:
        address = ipaddress.ip_address((scope.get("client") or ("",))[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def knows(token: bytes, given: str | bytes | None) -> bool:
    """Whether the given text is the token."""
    given = given.encode() if isinstance(given, str) else given or b""
    return bool(token) and hmac.compare_digest(given, token)


def main() -> None:
    """Run the program that the first argument names, with the other arguments."""
    program = sys.argv.pop(1)
    if program == "superlink":
        from fewbytes.flower.private import requests, superlink

        secret, local = Path(sys.argv.pop(1)), sys.argv.pop(1)
        many = sys.argv[1:2] == ["many"]
        del sys.argv[1 : 1 + many]
        token = secret.read_bytes()
        superlink.run_superlink(
            secret,
            local,
            lambda app: Answering(
                Gate(LongPolling(app, requests), requests.FLEET, superlink.is_node), superlink.standing
            ),
            lambda given: knows(token, given),
            many,
        )
    elif program == LAUNCHER:
        from fewbytes.flower.private.launcher import run_launcher

        run_launcher()
    else:
        from fewbytes.flower.private.supernode import run_supernode

        run_supernode(is_installed, APPLICATION)


if __name__ == "__main__":
    main()
