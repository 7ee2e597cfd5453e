"""A TCP proxy that stands for one client's link: it counts the bytes each way, may limit their rate, and does harm.

    with Proxy("127.0.0.1", 8000, up=Faults(rate=1e6), down=Faults(reset=50_000)) as proxy:
        ...  # connect to 127.0.0.1:proxy.port
        print(proxy.snapshot(), proxy.up.struck)
        with proxy.unplugged():
            ...  # connections were reset, new ones are refused

Up is towards the target. What is counted are the bytes of the TCP streams, so TLS records are in, TCP/IP headers are
not. A limit is one token bucket per direction for all connections together, with 16 kB of burst, below 160 kB/s a tenth
of a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

BURST = 16_384  # bytes, the most that is forwarded at once
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets


@dataclass(frozen=True)
class Faults:
    """What befalls one direction of each connection; numbers of bytes are means, what they come to is drawn, but for
    `reset_at`."""

    rate: float = math.inf  # bytes per second, of all connections together; exact to 2 % up to about 8 MB/s
    delay: float = 0.0  # seconds that each piece of at most 16 kB waits, one after the other
    flip: float = math.inf  # one bit in so many bytes is another
    reset: float = math.inf  # both ends are reset when so many bytes have passed
    reset_at: float = math.inf  # the same, always after so many
    half_close: float = math.inf  # the direction ends after so many bytes, the other goes on
    stall: float = math.inf  # after so many bytes nothing passes any more, and nobody is told


NONE = Faults()


class Link:
    """One direction: the bytes that have passed, when the next ones may, and how often which fault has struck.

    `faults` may be put in another's place at any time, for connections to come.
    """

    def __init__(self, faults: Faults, seed: str) -> None:
        self.faults = faults
        self.bytes = 0
        self.struck = Counter[str]()
        self._rng = random.Random(seed)
        self._free = 0.0  # the bucket is empty until then; further back than a burst: full

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a stream to its end, or until a fault ends it. Raises ConnectionResetError for a reset."""
        faults, passed = self.faults, 0
        burst = min(BURST, max(1, round(min(BURST * 10, faults.rate) / 10)))
        flip = self._drawn(faults.flip)
        ends = {name: self._drawn(getattr(faults, name)) for name in ("reset", "half_close", "stall")}
        ends["reset"] = min(ends["reset"], faults.reset_at)
        end = min(ends, key=lambda name: ends[name])
        while data := bytearray(await reader.read(int(min(burst, ends[end] - passed)))):
            now = time.monotonic()
            self._free = max(self._free, now - burst / faults.rate) + len(data) / faults.rate
            await asyncio.sleep(max(self._free - now, 0) + faults.delay)
            while flip < passed + len(data):
                data[int(flip) - passed] ^= 1 << self._rng.randrange(8)
                self.struck["flip"] += 1
                flip += self._drawn(faults.flip)
            passed += len(data)
            self.bytes += len(data)
            writer.write(data)
            await writer.drain()
            if passed == ends[end]:
                self.struck[end] += 1
                if end == "reset":
                    raise ConnectionResetError
                if end == "stall":
                    await writer.wait_closed()
                break
        writer.write_eof()

    def _drawn(self, mean: float) -> float:
        """A whole number of bytes, at least one; none (infinitely many) where the mean is."""
        return math.ceil(mean * self._rng.expovariate(1)) if mean < math.inf else math.inf


class Proxy:
    """Listens on a free port of 127.0.0.1 while the context lasts; runs in a thread of its own."""

    def __init__(
        self, target_host: str, target_port: int, up: Faults = NONE, down: Faults = NONE, seed: int = 0
    ) -> None:
        self.target = target_host, target_port
        self.port = 0
        self.connections = 0  # accepted so far
        self.up, self.down = Link(up, f"{seed} up"), Link(down, f"{seed} down")
        self._socket: socket.socket | None = socket.create_server(("127.0.0.1", 0))
        self._open = set[asyncio.StreamWriter]()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def snapshot(self) -> tuple[int, int]:
        """(bytes up, bytes down) until now: those that reached the target, and those that came back."""
        return self.up.bytes, self.down.bytes

    def cut(self) -> int:
        """Reset every connection there is; how many there were."""
        return self._do(self._cut())

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """Every connection is reset, and new ones are refused while the context lasts."""
        self._do(self._shut())
        try:
            yield
        finally:
            self._do(self._listen())

    def __enter__(self) -> Self:
        assert self._socket is not None
        self.port = self._socket.getsockname()[1]
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    def _do(self, doing: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result()

    async def _serve(self) -> None:
        await self._listen()
        await self._stop.wait()
        self._server.close()

    async def _listen(self) -> None:
        there, self._socket = self._socket or socket.create_server(("127.0.0.1", self.port)), None
        self._server = await asyncio.start_server(self._accept, sock=there)

    async def _shut(self) -> None:
        self._server.close()
        await self._cut()

    async def _cut(self) -> int:
        writers = list(self._open)
        for writer in writers:
            _reset(writer)
        return len(writers) // 2

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
            there, onward = await asyncio.open_connection(*self.target)
            ends = {writer, onward}
            self._open |= ends
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._carry(self.up, reader, onward, ends))
                    both.create_task(self._carry(self.down, there, writer, ends))
            finally:
                self._open -= ends
                onward.close()

    async def _carry(
        self,
        link: Link,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: set[asyncio.StreamWriter],
    ) -> None:
        try:
            await link.carry(reader, writer)
        except OSError:  # one end is gone: so is the other, at once
            for end in ends:
                _reset(end)


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
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
            Proxy(*server.getsockname(), up=Faults(rate), down=Faults(rate)) as proxy,
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
