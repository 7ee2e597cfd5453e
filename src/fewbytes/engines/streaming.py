"""Clients that are kept at work while rounds go by, whose replies are taken as they come."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fewbytes.base.streams import stream
from fewbytes.core.ledger import LeftOut
from fewbytes.core.network import Handler
from fewbytes.core.problem import Id
from fewbytes.engines.blame import Blame
from fewbytes.engines.clock import Clock
from fewbytes.engines.dispatcher import Flight, Order
from fewbytes.engines.outbox import Outbox
from fewbytes.engines.quorum import Quorum
from fewbytes.engines.replies import Replies
from fewbytes.engines.requests import Requests
from fewbytes.engines.terms import Origin
from fewbytes.engines.underway import AtWork, Work


class Streaming:
    """The stream of a run (`fewbytes.core.network.Network.stream`), and who is at work for it."""

    def __init__(self, outbox: Outbox, replies: Replies, quorum: Quorum, blame: Blame, clock: Clock) -> None:
        self.at_work = AtWork()
        self.clock = clock
        self._outbox, self._replies, self._quorum, self._blame = outbox, replies, quorum, blame
        self._dispatcher, self._roster = outbox.dispatcher, outbox.dispatcher.roster
        self._flights: dict[Id, Flight] = {}  # of those at work to whom their request has been sent

    @property
    def busy(self) -> Collection[Id]:
        """The clients that have been sent their requests."""
        return self._flights.keys()

    def take_over(self, origin: Origin) -> None:
        """Stand as the run stood there."""
        self._end([work.client for work in self.at_work])
        self.at_work.clear()
        self.clock.now = origin.clock
        self.at_work.unpack(origin.under_way, self._outbox, self._outbox.handlers.named)

    def give_up(self) -> None:
        """Nobody who is at work is waited for any more: no round is to come for the replies."""
        why = "still at work when the last round ended"
        self._give_up({work.client: why for work in self.at_work}, "surplus")

    def replies(self, handler: Handler, send: Any, at_once: int) -> Iterator[tuple[Id, Any, int]]:
        """Keep so many clients at work on a handler; replies as they come, and how many rounds ago each was asked."""
        step, blame = self._replies.step, self._blame
        self._pass_over(handler)
        able = [i for i in self._roster.clients if i not in self._roster.not_asked]
        failed = [left for left in step.left_out if left.client in blame.barred]
        rng = stream(self._roster.problem.seed, "server", step.t, "stream")
        requests = Requests(self._outbox, handler, dict.fromkeys(able, send), able)
        try:
            self._check(handler, able, failed, at_once)
            while True:
                free = [i for i in able if i not in self.at_work and i not in step.streamed]
                places = min(at_once - len(self.at_work), len(free))
                for client in sorted(map(int, rng.choice(free, places, replace=False))) if places > 0 else ():
                    until = self.clock.now + self.clock.takes(client)
                    self.at_work.add(Work(client, handler.name, step.t, step.scored, until, 0), requests)
                if not len(self.at_work):
                    return
                work, reply = self._next(handler)
                step.streamed.add(work.client)
                if isinstance(reply, LeftOut):
                    failed.append(reply)
                    self._check(handler, able, failed, at_once)
                    continue
                step.staleness.append(step.t - work.round)
                blame.read(handler, work.client, reply)
                yield work.client, reply, step.staleness[-1]
        except Exception:  # not the method's: what that raises does not come by here
            blame.failed = True
            raise
        finally:  # also where the method has had enough
            blame.last = None
            requests.close()

    def _pass_over(self, handler: Handler) -> None:
        """Leave out who is not asked, and who is at work but has left."""
        step, present = self._replies.step, self._roster.present
        for why, outcome in ((self._roster.not_asked, "excluded"), (self._blame.barred, "rejected")):
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
        """Wait for one of those who are at work: who is done first by the clock or, where that is a real one, answers
        first; of several, who was asked first."""
        turns = sorted(self.at_work, key=lambda work: work.until)
        for work in turns:
            if work.client not in self._flights:
                if work is not turns[0] and len(self._flights) >= self._dispatcher.transport.ahead:
                    break
                self._flights[work.client] = self._dispatcher.launch(work.client, partial(self._order, work), call=0)
        sent = [self._flights[work.client] for work in turns if work.client in self._flights]
        flight = self._dispatcher.first(sent[:1] if self.clock.simulated else sent)
        del self._flights[flight.client]
        request = self.at_work.request(flight.client)
        work, _ = self.at_work.take(flight.client)
        self.clock.now = max(self.clock.now, work.until)
        return work, self._replies.received(handler, flight, request)

    def _order(self, work: Work, client: Id) -> Order:
        """The same whenever it is asked, so that a node that has done it answers with what it has kept."""
        job = self._dispatcher.job(work.handler, client, work.round, work.scored)
        return job, self.at_work.request(client).fill(job)

    def _give_up(self, clients: Mapping[Id, str], outcome: str) -> None:
        self._end(list(clients))
        for client, why in clients.items():
            work, request = self.at_work.take(client)
            self._replies.pass_over(work.handler, client, outcome, why, request)

    def _end(self, clients: Sequence[Id]) -> None:
        self._dispatcher.end([self._flights.pop(client) for client in clients if client in self._flights])
