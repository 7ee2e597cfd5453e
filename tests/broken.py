"""Broken set-ups of a site: servers, proxies and firewalls that fail in a certain way, on loopback."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fewbytes.experiments.hosts import write_site
from fewbytes.federation import members


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port of 127.0.0.1 whose connections are served, one after another, each in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as there:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=served, args=(there.accept()[0],), daemon=True).start()

        def served(connection: socket.socket) -> None:
            with suppress(OSError), connection:
                serve(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield there.getsockname()[1]


def with_tls(folder: Path) -> Callable[[socket.socket], None]:
    """Serves the certificate server.pem and server.key of a folder."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "server.pem", folder / "server.key")

    def serve(connection: socket.socket) -> None:
        with tls.wrap_socket(connection, server_side=True) as shown:
            shown.recv(1)

    return serve


def greeting(connection: socket.socket) -> None:
    """What an SSH server does."""
    connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")
    connection.recv(1)


def silent(connection: socket.socket) -> None:
    """Takes all, and answers nothing."""
    while connection.recv(1 << 16):
        pass


def answering(status: str) -> Callable[[socket.socket], None]:
    """A proxy that answers every request with this status."""

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())

    return serve


def relaying(connection: socket.socket) -> None:
    """A proxy that connects."""
    if not (asked := connection.recv(1 << 16)):
        return
    host, _, port = asked.split()[1].decode().rpartition(":")
    with socket.create_connection((host, int(port))) as beyond:
        connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        while True:
            for each in select.select([connection, beyond], [], [])[0]:
                if not (piece := each.recv(1 << 16)):
                    return
                (beyond if each is connection else connection).sendall(piece)


@contextmanager
def dropping() -> Iterator[int]:
    """A port whose connections are not answered at all: Linux drops packets for a full queue, as a firewall does."""
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        there.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(there.getsockname())
        yield there.getsockname()[1]
        for each in waiting:
            each.close()


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def site(place: Path, address: str, name: str = "north") -> Path:
    """The folder of a site's node, a member of place/federation, whose data are a table."""
    if not (place / "federation").exists():
        members.make(place / "federation", address, None)
    folder = place / name
    request = write_site(folder, members.invite(place / "federation", name), name)
    members.join(place / "federation", request)
    rows = [f"{20 + i * 37 % 61},{i * i % 7},{'ab'[i % 2]}" for i in range(60)]
    (folder / "data.csv").write_text("\n".join(["age,dose,label", *rows]))
    change(folder, "[config]", '[config]\nclient-data = "data.csv"')
    return folder


def change(folder: Path, old: str, new: str) -> None:
    """Change a node's node.toml."""
    path = folder / "node.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
