"""A TCP proxy that stands for one client's link: it counts the bytes each way and may limit their rate.

    with Proxy("127.0.0.1", 8000, uplink=1e6) as proxy:  # bytes per second; None: unlimited
        ...  # connect to 127.0.0.1:proxy.port
        print(proxy.snapshot())

Up is towards the target. What is counted are the bytes of the TCP streams, so TLS records are in, TCP/IP headers are
not. A limit is one token bucket per direction for all connections together, with 16 kB of burst.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

BURST = 16_384  # bytes, the bucket's size and the most that is forwarded at once


class Link:
    """One direction: the bytes that have passed, and when the next ones may."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self.bytes = 0
        self._free = 0.0  # the bucket is empty until then; further back than a burst: full

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a stream to its end."""
        while data := await reader.read(BURST):
            if self.rate is not None:
                now = time.monotonic()
                self._free = max(self._free, now - BURST / self.rate) + len(data) / self.rate
                await asyncio.sleep(self._free - now)
            self.bytes += len(data)
            writer.write(data)
            await writer.drain()
        writer.write_eof()


class Proxy:
    """Listens on a free port of 127.0.0.1 while the context lasts; runs in a thread of its own.

    `uplink`, `downlink`: bytes per second, None for no limit. Limits are exact to 2 % up to about 8 MB/s.
    """

    def __init__(
        self, target_host: str, target_port: int, uplink: float | None = None, downlink: float | None = None
    ) -> None:
        self.target = target_host, target_port
        self.port = 0
        self.connections = 0  # accepted so far
        self._up, self._down = Link(uplink), Link(downlink)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    @property
    def bytes_up(self) -> int:
        """Bytes that reached the target."""
        return self._up.bytes

    @property
    def bytes_down(self) -> int:
        """Bytes that came back."""
        return self._down.bytes

    def snapshot(self) -> tuple[int, int]:
        """(bytes up, bytes down) until now."""
        return self.bytes_up, self.bytes_down

    def __enter__(self) -> Self:
        self.port = self._socket.getsockname()[1]
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._accept, sock=self._socket):
            await self._stop.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
            there, onward = await asyncio.open_connection(*self.target)
            with contextlib.closing(onward):
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._carry(self._up, reader, onward))
                    both.create_task(self._carry(self._down, there, writer))

    async def _carry(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await link.carry(reader, writer)
        except OSError:  # one end is gone: so is the other, at once
            writer.transport.abort()


def check(rate: float, size: int = 4_000_000) -> float:
    """Send and receive `size` bytes through a limited proxy; the measured rate over the asked one, the worse way."""

    def echo(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            left = size
            while left:
                left -= len(connection.recv(1 << 16))
            connection.sendall(b"!")
            connection.sendall(bytes(size))

    ratios = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        with (
            Proxy(*server.getsockname(), uplink=rate, downlink=rate) as proxy,
            socket.create_connection(("127.0.0.1", proxy.port)) as here,
        ):
            started = time.monotonic()
            here.sendall(bytes(size))
            left = size + 1
            while left:
                left -= len(here.recv(1 << 16 if left <= size else 1))
                now = time.monotonic()
                if left in (size, 0):
                    ratios.append(size / (now - started) / rate)
                    started = now
            assert proxy.snapshot() == (size, size + 1)
    return max(ratios, key=lambda ratio: abs(ratio - 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.5e6, 1e6, 4e6, 8e6], help="bytes per second")
    for rate in parser.parse_args().rates:
        print(f"{rate / 1e6:.1f} MB/s asked, the worse way is {check(rate) - 1:+.2%} off")
