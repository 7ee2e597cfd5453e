"""The proxy that stands for a bad link does the harm it is asked to do, and no other."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from proxy import BURST, Faults, Proxy

SENT = bytes(range(256)) * 1000


@contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Where a server is that does so with each connection, in threads."""

    def accept() -> None:
        while True:
            try:
                connection, _ = there.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as there:
        threading.Thread(target=accept, daemon=True).start()
        yield there.getsockname()
        there.shutdown(socket.SHUT_RDWR)


def echo(connection: socket.socket) -> None:
    with connection:
        try:
            while data := connection.recv(1 << 16):
                connection.sendall(data)
        except OSError:
            return


def connected(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), 10)


def silent(here: socket.socket) -> None:
    here.settimeout(0.3)
    with pytest.raises(TimeoutError):
        here.recv(1)


def exchanged(proxy: Proxy, data: bytes = SENT) -> bytes:
    """What comes back of what is sent at once, until the end or a reset."""
    got = bytearray()
    with connected(proxy) as here:

        def send() -> None:
            try:
                here.sendall(data)
                here.shutdown(socket.SHUT_WR)
            except OSError:
                return

        sender = threading.Thread(target=send)
        sender.start()
        try:
            while piece := here.recv(1 << 16):
                got += piece
        except ConnectionResetError:
            got += b"!"
        sender.join()
    return bytes(got)


def test_without_faults_all_passes_and_is_counted():
    with server(echo) as there, Proxy(*there) as proxy:
        assert exchanged(proxy) == SENT
        assert proxy.snapshot() == (len(SENT), len(SENT))
        assert exchanged(proxy, b"") == b""
        assert proxy.connections == 2
    assert not proxy.up.struck + proxy.down.struck


def test_a_reset_comes_after_as_many_bytes_as_the_seed_says():
    passed = []
    for seed in (1, 1, 2):
        with server(echo) as there, Proxy(*there, up=Faults(reset=50_000), seed=seed) as proxy:
            got = exchanged(proxy)
            assert got.endswith(b"!")
            assert SENT.startswith(got[:-1])
            assert proxy.up.struck == {"reset": 1}
            passed.append(proxy.up.bytes)
    assert passed[0] == passed[1] != passed[2]
    assert 0 < passed[0] < len(SENT)


def test_flipped_bits_are_as_many_as_are_counted():
    with server(echo) as there, Proxy(*there, down=Faults(flip=10_000)) as proxy:
        got = exchanged(proxy)
        flipped = sum((a ^ b).bit_count() for a, b in zip(SENT, got, strict=True))
    assert flipped == proxy.down.struck["flip"] > 5
    assert not proxy.up.struck


def test_a_half_closed_direction_ends_and_the_other_goes_on():
    with server(echo) as there, Proxy(*there, up=Faults(half_close=50_000)) as proxy:
        got = exchanged(proxy)
        assert proxy.up.struck == {"half_close": 1}
        assert got == SENT[: proxy.up.bytes]


def test_a_stalled_direction_passes_no_more_and_says_nothing():
    with server(echo) as there, Proxy(*there, up=Faults(stall=1000)) as proxy, connected(proxy) as here:
        here.sendall(SENT[:20_000])
        got = b""
        while len(got) < proxy.up.bytes or not proxy.up.struck:
            got += here.recv(1 << 16)
        silent(here)
        assert proxy.up.struck == {"stall": 1}
        assert got == SENT[: proxy.up.bytes]


def test_a_delay_and_a_rate_hold_back_what_passes():
    with server(echo) as there, Proxy(*there, up=Faults(delay=0.2)) as proxy:
        started = time.monotonic()
        assert exchanged(proxy, SENT[:1000]) == SENT[:1000]
        assert time.monotonic() - started >= 0.2
    with server(echo) as there, Proxy(*there, up=Faults(rate=100_000)) as proxy:
        started = time.monotonic()
        assert exchanged(proxy, SENT[:40_000]) == SENT[:40_000]
        assert time.monotonic() - started >= (40_000 - BURST) / 100_000
    with server(echo) as there, Proxy(*there, up=Faults(rate=0.01)) as proxy, connected(proxy) as here:
        here.sendall(b"slow")
        assert here.recv(10) == b"s"
        silent(here)


def test_a_link_that_is_cut_resets_what_there_is_and_takes_what_comes():
    with server(echo) as there, Proxy(*there) as proxy:
        with connected(proxy) as here, connected(proxy) as other:
            for each in (here, other):
                each.sendall(b"a")
                assert each.recv(1) == b"a"
            assert proxy.cut() == 2
            for each in (here, other):
                with pytest.raises(ConnectionResetError):
                    each.recv(1)
        assert exchanged(proxy, b"again") == b"again"


def test_an_unplugged_link_refuses_until_it_is_there_again():
    with server(echo) as there, Proxy(*there) as proxy:
        with closing(connected(proxy)) as here:
            here.sendall(b"a")
            assert here.recv(1) == b"a"
            with proxy.unplugged():
                with pytest.raises(ConnectionResetError):
                    here.recv(1)
                with pytest.raises(ConnectionRefusedError):
                    connected(proxy)
        assert exchanged(proxy, b"again") == b"again"
