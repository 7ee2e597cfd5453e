"""The server: federated averaging over HTTP, with the codec both ways. `python server.py`, then three clients."""

import argparse
import asyncio

import torch
from aiohttp import web
from task import CLIENTS, accuracy, net

from fewbytes.codec import DecodeError, Stream, decode

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--rounds", type=int, default=10)
parser.add_argument("--bits", type=float, help="per value, in what is sent to clients (default: lossless)")
options = parser.parse_args()
stream = Stream(options.bits)
stream.advance(net.state_dict())
size = sum(value.nbytes for value in net.state_dict().values())
replies, sent, left = {}, {"up": 0, "down": 0}, set()
averaged, finished = asyncio.Condition(), asyncio.Event()


async def model(request: web.Request) -> web.Response:
    """What brings a client to the last version from the one that it holds (0: none); empty after the last round."""
    client, version = request.query["client"], int(request.query["version"])
    if stream.version > options.rounds:
        left.add(client)
        if len(left) == CLIENTS:
            finished.set()
        return web.Response()
    stream.received(client, version) if version else stream.forget(client)
    data = stream.message(client)
    sent["down"] += len(data)
    return web.Response(body=data)


async def update(request: web.Request) -> web.Response:
    """A client's model, as its difference from the version that it was sent. Answers when the round is over."""
    client, version, data = request.query["client"], int(request.query["version"]), await request.read()
    async with averaged:
        if version != stream.version:
            raise web.HTTPConflict(text="that round is over")
        try:
            net.load_state_dict(decode(data, stream.held, limit=2 * size))  # refuses other names and shapes
        except (DecodeError, RuntimeError) as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        replies[client] = {name: value.clone() for name, value in net.state_dict().items()}
        sent["up"] += len(data)
        if len(replies) == CLIENTS:
            models = [replies[each] for each in sorted(replies)]  # the same sum whoever comes first
            mean = {name: torch.stack([each[name] for each in models]).mean(0) for name in net.state_dict()}
            net.load_state_dict(stream.advance(mean))
            up, down = (f"{sent[way] / 1e3:.0f} kB {way}" for way in sent)
            plain = f"{CLIENTS * size * version / 1e3:.0f} kB each way without the codec"
            print(f"round {version}: accuracy {100 * accuracy():.1f} %, so far {up}, {down} ({plain})", flush=True)
            replies.clear()
            averaged.notify_all()
        await averaged.wait_for(lambda: stream.version > version)
    return web.Response()


async def main() -> None:
    app = web.Application(client_max_size=2 * size)
    app.add_routes([web.get("/model", model), web.post("/update", update)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", options.port).start()
    print("listening on http://{}:{}".format(*runner.addresses[0]), flush=True)
    await finished.wait()
    await runner.cleanup()


asyncio.run(main())
