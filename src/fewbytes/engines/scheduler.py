"""A method's calls and streams, run on clients: who is asked, when, and in which order replies reach the method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from fewbytes.base.errors import MethodError
from fewbytes.core.ledger import LeftOut
from fewbytes.core.metrics import Scores, possible
from fewbytes.core.network import Handler
from fewbytes.core.policy import TooFewReplies
from fewbytes.core.problem import Id
from fewbytes.core.step import Step
from fewbytes.engines.dispatcher import Order
from fewbytes.engines.handlers import SCORE
from fewbytes.engines.quorum import Quorum
from fewbytes.engines.replies import Check, Replies
from fewbytes.engines.requests import Outbox, Requests
from fewbytes.engines.streaming import Streaming
from fewbytes.engines.suspects import Suspects
from fewbytes.engines.terms import Terms


class Scheduler:
    """What a network asks of an engine (`fewbytes.core.network.Exchanges`), over any transport.

    A call releases replies in the order asked, a stream in the order they come (`Streaming`).
    """

    def __init__(
        self, terms: Terms, outbox: Outbox, replies: Replies, quorum: Quorum, suspects: Suspects, streaming: Streaming
    ) -> None:
        self.method, self.task, self.problem = terms.method, terms.task, terms.task.problem
        self.outbox, self.replies, self.quorum, self.suspects, self.streaming = (
            outbox,
            replies,
            quorum,
            suspects,
            streaming,
        )
        self.dispatcher, self.roster, self.handlers = outbox.dispatcher, outbox.dispatcher.roster, outbox.handlers
        self._open: str | None = None  # the handler of the call that is being read
        self._reading: Iterator[tuple[Id, Any]] = iter(())  # its replies

    @property
    def step(self) -> Step:
        """What is being taken."""
        return self.replies.step

    @property
    def clients(self) -> list[Id]:
        """The clients that are there, in ascending order."""
        return self.roster.clients

    def sample(self, fraction: float) -> list[Id]:
        """The step's cohort."""
        return self.quorum.sample(self.step, fraction)

    def leave(self, function: Callable[..., Any], to: Mapping[Id, Any] | None, send: Any, part: str) -> None:
        """Leave messages with clients' next requests."""
        self.outbox.waiting.leave(self.handlers.of(function), to, send, part)

    def set_part(self, part: str, members: Sequence[Id]) -> None:
        """Say who is in a part of the network."""
        self.outbox.waiting.set_part(part, members)

    def exchange(
        self,
        function: Callable[..., Any],
        to: Iterable[Id] | Mapping[Id, Any],
        send: Any,
        part: str = "",
        check: Check | None = None,
    ) -> Iterator[tuple[Id, Any]]:
        """Run a handler on clients; replies in the order asked."""
        self._may_ask()
        present = self.roster.present
        asked = [i for i in to if i in present or not self.roster.has_left(i, self.step.t)]
        if len(set(asked)) != len(asked):
            raise MethodError("a client is asked twice in one call")
        if unknown := [i for i in asked if i not in present]:
            raise MethodError(f"unknown clients are asked: {unknown[:5]}")
        if busy := [i for i in asked if i in self.streaming.at_work]:
            raise MethodError(f"clients are asked that are at work for a stream: {busy[:5]}")
        own, handler = isinstance(to, Mapping), self.handlers.of(function)
        messages: Mapping[Id, Any] = to if isinstance(to, Mapping) else dict.fromkeys(asked, send)
        self.step.asked = len(asked)
        self.step.updates.call += 1
        self._open = handler.name  # from now on, so that a call nobody reads is an error, too
        able = [i for i in asked if i not in self.roster.not_asked and i not in self.suspects.barred]
        if not own and self.outbox.downlink.rounds(handler, type(send)):
            self.outbox.downlink.to_all(handler, send, able, part)
        self._reading = self._read(handler, asked, able, messages, own, check)
        return self._reading

    def stream(self, function: Callable[..., Any], send: Any, at_once: int) -> Iterator[tuple[Id, Any, int]]:
        """Keep so many clients at work on a handler; replies as they come."""
        self._may_ask()
        handler = self.handlers.of(function)
        if not self.method.promises.streams:
            raise MethodError(
                f"{type(self.method).__name__} streams {handler.name!r}, and must say so: Promises(streams=True)"
            )
        if self.step.privacy is not None:
            raise MethodError("a noisy mean is of a cohort that is asked together, not of a stream: call it")
        if at_once < 1:
            raise MethodError(f"a stream keeps at least one client at work, not {at_once}")
        if self.outbox.waiting.handlers():
            raise MethodError("messages wait for clients' next requests, which a stream does not carry: call them")
        if other := next((work.handler for work in self.streaming.at_work if work.handler != handler.name), None):
            raise MethodError(f"clients are still at work on {other!r}: a run streams one handler")
        return self.streaming.replies(handler, send, at_once)

    def _may_ask(self) -> None:
        self.idle()
        if self.step.released:
            raise MethodError("nothing is sent after a noisy mean before the round is kept: what is done again counts")

    def idle(self) -> None:
        """Raises MethodError if a call was left unread or half-read."""
        if self._open is not None:
            self.suspects.failed = True  # no client's reply does that
            raise MethodError(
                f"the call of {self._open!r} was not read to its end before the next step: its clients run as their "
                "replies are read"
            )

    def abandon(self) -> None:
        """Forget a call that ended in an error; what is still on its way is received."""
        with suppress(Exception):
            for _ in self._reading:
                pass
        self._open, self.suspects.last = None, None

    def deliver(self) -> None:
        """Send all that waits, on its own, to those who answer: no round is to come for which the others must know."""
        waiting = self.outbox.waiting
        for name in waiting.handlers():
            with suppress(TooFewReplies):
                for _ in self.exchange(self.handlers.function(name), waiting.to(name, self.clients), None):
                    pass
            self.abandon()
        waiting.clear()

    def score_clients(self) -> dict[Id, Scores]:
        """The metrics of every client's own model on its test split; empty if the method has none."""
        if not self.method.has_local_models:
            return {}
        self.step.calls += 1
        data, scores = self.task.data.clients, dict[Id, Scores]()
        clients = [i for i in self.clients if not self.streaming.clock.simulated or len(data[i].test)]
        for client, answer in self.dispatcher.ask(SCORE, clients, self.step.t, self.step.scored, self.step.calls):
            if answer.outcome == "answered":
                scores[client] = possible(answer.done.scores, self.problem.objective.metrics)
            else:
                self.step.left_out.append(LeftOut(client, SCORE, answer.outcome, answer.why))
        return scores

    def _read(
        self,
        handler: Handler,
        asked: Sequence[Id],
        able: Sequence[Id],
        messages: Mapping[Id, Any],
        own: bool,
        check: Check | None,
    ) -> Iterator[tuple[Id, Any]]:
        """The replies of a call, of those asked who are able, each entered in the ledger when it is its turn."""
        step, failed = self.step, list[LeftOut]()
        try:
            self._pass_over(handler, asked)
            requests = Requests(self.outbox, handler, messages, able, own)
            step.calls += 1
            self.streaming.clock.exchange(able)
            wanted = self.quorum.wanted(step, able)

            def order(client: Id) -> Order:
                job = self.dispatcher.job(handler.name, client, step.t, step.scored)
                return job, requests.write(client).fill(job)

            with closing(self.dispatcher.in_order(able, order, step.calls, wanted)) as flights:
                for flight in flights:
                    request = requests.take(flight.client) if flight.client in requests.open else None
                    reply = self.replies.received(handler, flight, request, check)
                    if not isinstance(reply, LeftOut):
                        self.suspects.read(handler, flight.client, reply)
                        yield flight.client, reply
                    elif reply.outcome != "surplus":
                        failed.append(reply)
                        self.quorum.check(step, handler.name, len(able), failed, wanted)
        except Exception:  # not the method's: what that raises does not come by here
            self.suspects.failed, self.suspects.last, self._open = True, None, None
            raise
        self._open, self.suspects.last = None, None

    def _pass_over(self, handler: Handler, asked: Sequence[Id]) -> None:
        """Leave out those who are not asked."""
        not_asked, barred = self.roster.not_asked, self.suspects.barred
        for client in (i for i in asked if i in not_asked):
            self.replies.pass_over(handler.name, client, "excluded", not_asked[client])
        rest = [i for i in asked if i not in not_asked]
        failed = [self.replies.pass_over(handler.name, i, "rejected", barred[i]) for i in rest if i in barred]
        if failed:
            self.quorum.check(self.step, handler.name, len(rest), failed)
