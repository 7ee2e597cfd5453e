"""What a SuperLink answers a registered node that checks its set-up: versions, and a megabyte each way."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

CHECK = "/v1/fewbytes/check"
"""The path of these questions."""
MEGABYTE = 1_000_000
"""Maximum bytes of a question, and the bytes of the answer to GET."""
PACKAGES = ("fewbytes", "flwr", "torch")
KNOWN, REMOVED, UNKNOWN = 200, 410, 401
"""The status of an answer to a registered key, to one that was removed, and to any other."""


class Answering:
    """An ASGI application that forwards all requests but those to CHECK to `app`.

    It answers only requests signed with a node's key, which `standing` looks up by the request's scope: KNOWN, REMOVED
    or UNKNOWN. Nothing of a body is read before. POST is answered with the versions of PACKAGES as JSON, GET with
    MEGABYTE random bytes, which no link can compress.
    """

    def __init__(self, app: Callable[..., Any], standing: Callable[[dict[str, Any]], int]) -> None:
        self.app, self.standing = app, standing

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Serve a request."""
        if scope["type"] != "http" or scope["path"] != CHECK:
            await self.app(scope, receive, send)
            return
        status, body = await asyncio.to_thread(self.standing, scope), b""
        if status == KNOWN and body_length(scope) > MEGABYTE:
            status = 413
        if status == KNOWN:
            while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                pass
            body = os.urandom(MEGABYTE) if scope["method"] == "GET" else json.dumps(versions()).encode()
        headers = [(b"content-length", str(len(body)).encode()), *([] if body else [(b"connection", b"close")])]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def body_length(scope: dict[str, Any]) -> float:
    """The bytes of a request's body; infinite if not declared."""
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return math.inf
    given = headers.get(b"content-length", b"0")
    return int(given) if given.isdigit() else math.inf


def versions() -> dict[str, str]:
    """The installed versions of PACKAGES; empty for one that is not installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found
