"""Clients that are at work for a stream while rounds go by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fewbytes.core.network import Handler
from fewbytes.core.problem import Id
from fewbytes.engines.requests import Request, Requests, Sender
from fewbytes.wire import pack_state, unpack_state


@dataclass
class Work:
    """What a client is at work on, and since which round."""

    client: int
    handler: str
    round: int  # in which it was asked; names its randomness
    scored: bool  # whether that round's models are scored
    until: float  # simulated seconds since the run began; 0 where none are
    message: int  # which of the frames it was sent


@dataclass
class UnderWay:
    """All who are at work, in the order asked, as a checkpoint holds them."""

    work: list[Work]
    frames: list[bytes]  # their messages, each once; empty: nothing was sent


class AtWork:
    """Who is at work for a stream, by client, in the order asked."""

    def __init__(self) -> None:
        self._work: dict[Id, tuple[Work, Requests]] = {}

    def __len__(self) -> int:
        return len(self._work)

    def __contains__(self, client: Id) -> bool:
        return client in self._work

    def __iter__(self) -> Iterator[Work]:
        return iter([work for work, _ in self._work.values()])

    def request(self, client: Id) -> Request:
        """What travels to a client that is at work."""
        return self._work[client][1].open[client]

    def add(self, work: Work, requests: Requests) -> None:
        """A client is asked, with one of these requests."""
        requests.write(work.client)
        self._work[work.client] = work, requests

    def take(self, client: Id) -> tuple[Work, Request]:
        """What a client was at work on, once its reply is here (or will not come)."""
        work, requests = self._work.pop(client)
        return work, requests.take(client)

    def clear(self) -> None:
        """Forget all."""
        for work in self:
            self.take(work.client)

    def packed(self) -> UnderWay:
        """All of it, for a checkpoint."""
        sent = {work.client: self.request(work.client).parts[-1].message for work in self}
        messages = {id(message): message for message in sent.values()}
        at = {key: i for i, key in enumerate(messages)}
        frames = [b"" if message is None else bytes(pack_state(message)) for message in messages.values()]
        return UnderWay([replace(work, message=at[id(sent[work.client])]) for work in self], frames)

    def unpack(self, resumed: UnderWay, engine: Sender, handler_of: Callable[[str], Handler]) -> None:
        """Undo `packed`."""
        for i, frame in enumerate(resumed.frames):
            of = [work for work in resumed.work if work.message == i]
            handler = handler_of(of[0].handler)
            message = unpack_state(handler.message, frame) if frame and handler.message else None
            clients = [work.client for work in of]
            requests = Requests(engine, handler, dict.fromkeys(clients, message), clients)
            for work in of:
                self.add(work, requests)
        self._work = {work.client: self._work[work.client] for work in resumed.work}  # in the order asked
