"""A slow link: a TCP relay that lets so many bytes a second through, each way."""

from __future__ import annotations

import asyncio
import threading


def slow_link(port: int, rate: float) -> int:
    """Relay connections to 127.0.0.1:`port` at `rate` bytes a second each way, in a thread; the port it listens on."""
    loop = asyncio.new_event_loop()

    async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(len(data) / rate)
        except ConnectionError:
            pass  # either end may hang up
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(through(reader, back), through(there, writer))

    server = loop.run_until_complete(asyncio.start_server(connected, "127.0.0.1", 0))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return int(server.sockets[0].getsockname()[1])
