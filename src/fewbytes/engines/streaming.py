"""Streams: clients keep working across rounds, and replies are taken as they arrive."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fewbytes.base.streams import stream
from fewbytes.core.ledger import LeftOut
from fewbytes.core.network import Handler
from fewbytes.core.problem import Id
from fewbytes.engines.dispatcher import Flight, Order
from fewbytes.engines.quorum import Quorum
from fewbytes.engines.replies import Replies
from fewbytes.engines.requests import Outbox, Request, Requests
from fewbytes.engines.suspects import Suspects
from fewbytes.engines.terms import Origin, UnderWay, Work
from fewbytes.wire import pack_state, unpack_state


class AtWork:
    """The clients working for a stream, in the order asked."""

    def __init__(self) -> None:
        self._work: dict[Id, tuple[Work, Requests]] = {}

    def __len__(self) -> int:
        return len(self._work)

    def __contains__(self, client: Id) -> bool:
        return client in self._work

    def __iter__(self) -> Iterator[Work]:
        return iter([work for work, _ in self._work.values()])

    def request(self, client: Id) -> Request:
        """The request of a working client."""
        return self._work[client][1].open[client]

    def add(self, work: Work, requests: Requests) -> None:
        """Ask a client with one of these requests."""
        requests.write(work.client)
        self._work[work.client] = work, requests

    def take(self, client: Id) -> tuple[Work, Request]:
        """Remove a client, after its reply has arrived or been given up; returns its work and request."""
        work, requests = self._work.pop(client)
        return work, requests.take(client)

    def clear(self) -> None:
        """Remove all clients."""
        for work in self:
            self.take(work.client)

    def packed(self) -> UnderWay:
        """Its state for a checkpoint."""
        sent = {work.client: self.request(work.client).parts[-1].message for work in self}
        messages = {id(message): message for message in sent.values()}
        at = {key: i for i, key in enumerate(messages)}
        frames = [b"" if message is None else bytes(pack_state(message)) for message in messages.values()]
        return UnderWay([replace(work, message=at[id(sent[work.client])]) for work in self], frames)

    def unpack(self, resumed: UnderWay, outbox: Outbox) -> None:
        """Undo `packed`."""
        for i, frame in enumerate(resumed.frames):
            of = [work for work in resumed.work if work.message == i]
            handler = outbox.handlers.named(of[0].handler)
            message = unpack_state(handler.message, frame) if frame and handler.message else None
            clients = [work.client for work in of]
            requests = Requests(outbox, handler, dict.fromkeys(clients, message), clients)
            for work in of:
                self.add(work, requests)
        self._work = {work.client: self._work[work.client] for work in resumed.work}  # in the order asked


class Streaming:
    """The stream of a run (`fewbytes.core.network.Network.stream`), and the clients working for it."""

    def __init__(self, outbox: Outbox, replies: Replies, quorum: Quorum, suspects: Suspects) -> None:
        self.at_work = AtWork()
        self.clock = replies.clock
        self._outbox, self._replies, self._quorum, self._suspects = outbox, replies, quorum, suspects
        self._dispatcher, self._roster = outbox.dispatcher, outbox.dispatcher.roster
        self._flights: dict[Id, Flight] = {}  # of working clients that have been sent their requests

    @property
    def busy(self) -> Collection[Id]:
        """The clients that have been sent their requests."""
        return self._flights.keys()

    def restore(self, origin: Origin) -> None:
        """Restore the state there."""
        self._end([work.client for work in self.at_work])
        self.at_work.clear()
        self.clock.now = origin.clock
        self.at_work.unpack(origin.under_way, self._outbox)

    def give_up(self) -> None:
        """Stop waiting for working clients after the last round."""
        why = "still at work when the last round ended"
        self._give_up({work.client: why for work in self.at_work}, "surplus")

    def replies(self, handler: Handler, send: Any, at_once: int) -> Iterator[tuple[Id, Any, int]]:
        """Keep `at_once` clients working on a handler; yields replies as they arrive, with staleness in rounds."""
        step, suspects = self._replies.step, self._suspects
        self._pass_over(handler)
        able = [i for i in self._roster.clients if i not in self._roster.not_asked]
        failed = [left for left in step.left_out if left.client in suspects.barred]
        rng = stream(self._roster.problem.seed, "server", step.t, "stream")
        requests = Requests(self._outbox, handler, dict.fromkeys(able, send), able)
        try:
            self._check(handler, able, failed, at_once)
            while True:
                free = [i for i in able if i not in self.at_work and i not in step.streamed]
                places = min(at_once - len(self.at_work), len(free))
                for client in sorted(map(int, rng.choice(free, places, replace=False))) if places > 0 else ():
                    work = Work(client, handler.name, step.t, step.scored, 0.0, 0)
                    self.at_work.add(work, requests)
                    work.until = self.clock.trained(client, self.clock.now, self.at_work.request(client).length)
                if not len(self.at_work):
                    return
                work, reply = self._next(handler)
                step.streamed.add(work.client)
                if isinstance(reply, LeftOut):
                    failed.append(reply)
                    self._check(handler, able, failed, at_once)
                    continue
                step.staleness.append(step.t - work.round)
                suspects.read(handler, work.client, reply)
                yield work.client, reply, step.staleness[-1]
        except Exception:  # the engine's own: the method's errors are not raised here
            suspects.failed = True
            raise
        finally:  # also when the method closes the stream
            suspects.last = None
            requests.close()

    def _pass_over(self, handler: Handler) -> None:
        """Leave out clients that are not asked, and working clients that have left."""
        step, present = self._replies.step, self._roster.present
        for why, outcome in ((self._roster.not_asked, "excluded"), (self._suspects.barred, "rejected")):
            for client in sorted(why.keys() & present - step.streamed):
                step.streamed.add(client)
                if client in self.at_work:
                    self._give_up({client: why[client]}, outcome)
                else:
                    self._replies.pass_over(handler.name, client, outcome, why[client])
        self._give_up({work.client: "it has left" for work in self.at_work if work.client not in present}, "surplus")

    def _check(self, handler: Handler, able: Sequence[Id], failed: Sequence[LeftOut], at_once: int) -> None:
        if failed:
            self._quorum.check(self._replies.step, handler.name, len(able), failed, min(at_once, len(able)))

    def _next(self, handler: Handler) -> tuple[Work, Any | LeftOut]:
        """Wait for the working client whose reply arrives first, by the simulated clock or in real time; ties go to the
        client asked first."""
        while True:
            turns = sorted(self.at_work, key=self._ends)
            for work in turns:
                if work.client not in self._flights:
                    if work is not turns[0] and len(self._flights) >= self._dispatcher.transport.ahead:
                        break
                    self._flights[work.client] = self._dispatcher.launch(
                        work.client, partial(self._order, work), call=0
                    )
            sent = [self._flights[work.client] for work in turns if work.client in self._flights]
            flight = self._dispatcher.first(sent[:1] if self.clock.simulated else sent)
            if not self.clock.simulated or flight.ended:
                break
            # sending the reply takes time, too, and another client's may arrive before it
            flight.ended = self.clock.arrives(flight.client, turns[0].until, len(flight.came.frame))
        del self._flights[flight.client]
        request = self.at_work.request(flight.client)
        work, _ = self.at_work.take(flight.client)
        self.clock.now = max(self.clock.now, flight.ended)
        return work, self._replies.received(handler, flight, request)

    def _ends(self, work: Work) -> float:
        """When a client's reply arrives or, before it is made, when the client has trained."""
        flight = self._flights.get(work.client)
        return flight.ended if flight is not None and flight.ended else work.until

    def _order(self, work: Work, client: Id) -> Order:
        """The same order however often it is sent, so that a node answers a repeated order with its stored reply."""
        job = self._dispatcher.job(work.handler, client, work.round, work.scored)
        return job, self.at_work.request(client).fill(job)

    def _give_up(self, clients: Mapping[Id, str], outcome: str) -> None:
        self._end(list(clients))
        for client, why in clients.items():
            work, request = self.at_work.take(client)
            self._replies.pass_over(work.handler, client, outcome, why, request)

    def _end(self, clients: Sequence[Id]) -> None:
        self._dispatcher.end([self._flights.pop(client) for client in clients if client in self._flights])
