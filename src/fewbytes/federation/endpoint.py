"""An HTTP endpoint for operators: /metrics for Prometheus, /health, and /status as JSON. It changes nothing."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import msgspec

from fewbytes.base.errors import UserError
from fewbytes.base.extras import needs
from fewbytes.federation.status import trouble
from fewbytes.running.node_status import NodeStatus
from fewbytes.running.status import Status, read

Read = Callable[[], Status | list[NodeStatus] | None]
"""The status now; None: the run has not begun."""


@contextmanager
def serving(address: str | None, status: Read) -> Iterator[None]:
    """Serve a status at `[HOST:]PORT`, by default on this machine alone, while the block runs; None: nowhere. Raises
    UserError for an address that is none or in use, and without prometheus-client."""
    if address is None:
        yield
        return
    needs("--monitor", "monitor", "prometheus_client")
    host, port = parse(address)
    try:
        server = _Server((host, port), status)
    except OSError as error:
        raise UserError(f"--monitor cannot listen on {address}: {(error.strerror or str(error)).lower()}") from None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def parse(address: str) -> tuple[str, int]:
    """Host and port of `[HOST:]PORT`; the default host is 127.0.0.1. Raises UserError.

    >>> from fewbytes.federation.endpoint import parse
    >>> parse("9100"), parse("[::]:9100")
    (('127.0.0.1', 9100), ('::', 9100))
    """
    found = re.fullmatch(r"(?:(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):)?(?P<port>[0-9]{1,5})", address)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise UserError(f"--monitor is {address!r}: expected [HOST:]PORT, such as 9100 or 0.0.0.0:9100")
    return (found["host"] or "127.0.0.1").strip("[]"), int(found["port"])


def of_run(folder: Path) -> Read:
    """Reads the status of the run in a folder, from now on: what an earlier process has written is not shown."""
    began = time.time()

    def status() -> Status | None:
        try:
            found = read(folder)
        except UserError:
            return None
        return found if found.written >= began else None

    return status


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], status: Read) -> None:
        self.status = status
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds for a request to arrive
    server: _Server
    KINDS: ClassVar = {"/metrics": "text/plain; version=0.0.4; charset=utf-8", "/status": "application/json"}

    def do_GET(self) -> None:
        """Answer one of the three paths."""
        path = self.path.partition("?")[0]
        status = self.server.status()
        wrong = "" if status is None else trouble(status)
        match path:
            case "/metrics":
                from fewbytes.federation.metrics import text

                self._send(200, text(status))
            case "/health":
                self._send(503 if wrong else 200, (wrong or ("starting" if status is None else "healthy")).encode())
            case "/status" if status is not None:
                self._send(200, msgspec.json.encode(status))
            case "/status":
                self._send(503, b"the run has not begun yet")
            case _:
                self._send(404, b"there are /metrics, /health and /status")

    def _send(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", self.KINDS.get(self.path, "text/plain; charset=utf-8"))
        self.send_header("Content-Length", str(len(body) + 1))
        self.end_headers()
        self.wfile.write(body + b"\n")

    def version_string(self) -> str:
        """Nothing about versions, for whoever asks."""
        return "fewbytes"

    def log_message(self, format: str, *args: object) -> None:
        """No line for each scrape."""
