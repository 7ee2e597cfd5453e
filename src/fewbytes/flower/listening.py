"""Where and with which certificates a SuperLink listens: at its address and on loopback, with what was renewed."""

from __future__ import annotations

import ssl
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn

from fewbytes.flower.children import is_loopback, listen

LOOK_SECONDS = 2.0  # between looks for a renewed certificate
EVERYWHERE = ("0.0.0.0", "::")


def run(app: Any, *, host: str, port: int, ssl_certfile: str, ssl_keyfile: str, **options: Any) -> None:
    """`uvicorn.run` that also listens on loopback, and serves a certificate that replaced the first one.

    If local.pem lies beside the certificate, connections to `localhost` get that one.
    """
    config = uvicorn.Config(app, host=host, port=port, ssl_certfile=ssl_certfile, ssl_keyfile=ssl_keyfile, **options)
    config.load()
    server, tls = uvicorn.Server(config), config.ssl
    assert tls is not None
    local = Path(ssl_certfile).with_name("local.pem")
    if local.exists():
        tls.sni_callback = _standing_in(local)
    files = Path(ssl_keyfile), Path(ssl_certfile)
    threading.Thread(target=_renew, args=(tls, files), daemon=True).start()
    hosts = [host] if host in EVERYWHERE or is_loopback(host) else [host, "127.0.0.1"]
    server.run([listen(each, port) for each in hosts])
    if not server.started:
        sys.exit(3)


def _standing_in(local: Path) -> Any:
    """A callback that has connections to localhost use another certificate."""
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    other.load_cert_chain(local, local.with_suffix(".key"))

    def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        if name == "localhost":
            connection.context = other

    return choose


def _renew(tls: ssl.SSLContext, files: Sequence[Path]) -> None:
    """Load the key and the certificate again whenever they change; connections that are open stay as they are."""
    changed, wait = _changed(files), threading.Event()
    while not wait.wait(LOOK_SECONDS):
        if (now := _changed(files)) != changed and None not in now:
            with suppress(OSError, ssl.SSLError):  # written one after the other: the next look finds both
                key, certificate = files
                tls.load_cert_chain(certificate, key)
                changed = now


def _changed(files: Sequence[Path]) -> list[int | None]:
    return [path.stat().st_mtime_ns if path.exists() else None for path in files]
