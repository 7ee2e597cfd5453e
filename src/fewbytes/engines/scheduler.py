"""Runs a method's calls and streams on clients: which are asked, when, and the order of their replies."""

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
from fewbytes.engines.dispatcher import Flight, Order
from fewbytes.engines.handlers import SCORE
from fewbytes.engines.quorum import Quorum
from fewbytes.engines.replies import Check, Replies
from fewbytes.engines.requests import Outbox, Request, Requests
from fewbytes.engines.streaming import Streaming
from fewbytes.engines.suspects import Suspects
from fewbytes.engines.terms import Terms


class Scheduler:
    """The engine behind a network (`fewbytes.core.network.Exchanges`), over any transport.

    A call yields replies in the order asked, a stream (`Streaming`) in the order they arrive.
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
        self._open: str | None = None  # the handler of the open call
        self._reading: Iterator[tuple[Id, Any]] = iter(())  # its replies

    @property
    def step(self) -> Step:
        """The current step."""
        return self.replies.step

    @property
    def clients(self) -> list[Id]:
        """The present clients, in ascending order."""
        return self.roster.clients

    def sample(self, fraction: float) -> list[Id]:
        """The step's sampled clients."""
        return self.quorum.sample(self.step, fraction)

    def leave(self, function: Callable[..., Any], to: Mapping[Id, Any] | None, send: Any, part: str) -> None:
        """Send messages with clients' next requests."""
        self.outbox.waiting.leave(self.handlers.of(function), to, send, part)

    def set_part(self, part: str, members: Sequence[Id]) -> None:
        """Set the members of a subset of the network."""
        self.outbox.waiting.set_part(part, members)

    def exchange(
        self,
        function: Callable[..., Any],
        to: Iterable[Id] | Mapping[Id, Any],
        send: Any,
        part: str = "",
        check: Check | None = None,
    ) -> Iterator[tuple[Id, Any]]:
        """Run a handler on clients; yields replies in the order asked."""
        self._may_ask()
        present = self.roster.present
        asked = [i for i in to if i in present or not self.roster.has_left(i, self.step.t)]
        if len(set(asked)) != len(asked):
            raise MethodError("a client is asked twice in one call")
        if unknown := [i for i in asked if i not in present]:
            raise MethodError(f"unknown clients are asked: {unknown[:5]}")
        if busy := [i for i in asked if i in self.streaming.at_work]:
            raise MethodError(f"a call asks clients that still work for a stream: {busy[:5]}")
        own, handler = isinstance(to, Mapping), self.handlers.of(function)
        messages: Mapping[Id, Any] = to if isinstance(to, Mapping) else dict.fromkeys(asked, send)
        self.step.asked = len(asked)
        self.step.updates.call += 1
        self._open = handler.name  # set here, so that an unread call is an error, too
        able = [i for i in asked if i not in self.roster.not_asked and i not in self.suspects.barred]
        if not own and self.outbox.downlink.rounds(handler, type(send)):
            self.outbox.downlink.to_all(handler, send, able, part)
        self._reading = self._read(handler, asked, able, messages, own, check)
        return self._reading

    def stream(self, function: Callable[..., Any], send: Any, at_once: int) -> Iterator[tuple[Id, Any, int]]:
        """Keep `at_once` clients working on a handler; yields replies as they arrive."""
        self._may_ask()
        handler = self.handlers.of(function)
        if not self.method.promises.streams:
            raise MethodError(
                f"{type(self.method).__name__} streams {handler.name!r}, and must declare it: Promises(streams=True)"
            )
        if self.step.privacy is not None:
            raise MethodError("a noisy mean needs clients that are asked together: use net.call, not net.stream")
        if at_once < 1:
            raise MethodError(f"a stream keeps at least one client at work, not {at_once}")
        if self.outbox.waiting.handlers():
            raise MethodError("messages wait for clients' next requests, but a stream carries none: use net.call")
        if other := next((work.handler for work in self.streaming.at_work if work.handler != handler.name), None):
            raise MethodError(f"clients still work on {other!r}: a run streams one handler")
        return self.streaming.replies(handler, send, at_once)

    def _may_ask(self) -> None:
        self.idle()
        if self.step.released:
            raise MethodError("nothing may be sent after a round's noisy mean: a repeated round would spend it twice")

    def idle(self) -> None:
        """Raises MethodError if a call was left unread or half-read."""
        if self._open is not None:
            self.suspects.failed = True  # no client's reply causes this
            raise MethodError(
                f"the call of {self._open!r} was not read to its end before the next step: its clients run as their "
                "replies are read"
            )

    def abandon(self) -> None:
        """Drop a call that ended in an error, after receiving its pending replies."""
        with suppress(Exception):
            for _ in self._reading:
                pass
        self._open, self.suspects.last = None, None

    def deliver(self) -> None:
        """Send all waiting messages after the last round; ignores clients that do not answer."""
        waiting = self.outbox.waiting
        for name in waiting.handlers():
            with suppress(TooFewReplies):
                for _ in self.exchange(self.handlers.function(name), waiting.to(name, self.clients), None):
                    pass
            self.abandon()
        waiting.clear()

    def score_clients(self) -> tuple[dict[Id, Scores], dict[Id, Scores]]:
        """The metrics of every client's own model on its test split, and on its validation data; empty if the method
        has none."""
        scores, validated = dict[Id, Scores](), dict[Id, Scores]()
        if not self.method.has_local_models(self.task.problem.own):
            return scores, validated
        self.step.calls += 1
        data, metrics = self.task.data.clients, self.problem.objective.metrics
        clients = [
            i for i in self.clients if not self.streaming.clock.simulated or len(data[i].test) or data[i].validation
        ]
        for client, answer in self.dispatcher.ask(SCORE, clients, self.step.t, self.step.scored, self.step.calls):
            if answer.outcome == "answered":
                scores[client] = possible(answer.done.scores, metrics)
                validated[client] = possible(answer.done.validation, metrics)
            else:
                self.step.left_out.append(LeftOut(client, SCORE, answer.outcome, answer.why))
        return scores, validated

    def _read(
        self,
        handler: Handler,
        asked: Sequence[Id],
        able: Sequence[Id],
        messages: Mapping[Id, Any],
        own: bool,
        check: Check | None,
    ) -> Iterator[tuple[Id, Any]]:
        """The replies of a call from the `able` clients; enters each in the ledger in its turn."""
        step, failed = self.step, list[LeftOut]()
        try:
            self._pass_over(handler, asked)
            requests = Requests(self.outbox, handler, messages, able, own)
            step.calls += 1
            clock = self.streaming.clock
            began = ended = clock.now
            wanted = self.quorum.wanted(step, able)

            def order(client: Id) -> Order:
                job = self.dispatcher.job(handler.name, client, step.t, step.scored)
                return job, requests.write(client).fill(job)

            with closing(self.dispatcher.in_order(able, order, step.calls, wanted)) as flights:
                for flight in flights:
                    request = requests.take(flight.client) if flight.client in requests.open else None
                    flight.ended = self._ended(began, flight, request)
                    ended = max(ended, flight.ended)
                    reply = self.replies.received(handler, flight, request, check)
                    if not isinstance(reply, LeftOut):
                        self.suspects.read(handler, flight.client, reply)
                        yield flight.client, reply
                    elif reply.outcome != "surplus":
                        failed.append(reply)
                        self.quorum.check(step, handler.name, len(able), failed, wanted)
            clock.now = ended
        except Exception:  # the engine's own: the method's errors are not raised here
            self.suspects.failed, self.suspects.last, self._open = True, None, None
            raise
        self._open, self.suspects.last = None, None

    def _ended(self, began: float, flight: Flight, request: Request | None) -> float:
        """When a client's answer to a call that began at that time comes, on the simulated clock."""
        clock, down = self.streaming.clock, 0 if request is None else request.length
        steps = 0 if flight.job is None else flight.job.steps or 0
        trained = clock.trained(flight.client, began, down, steps)
        return clock.arrives(flight.client, trained, len(flight.came.frame))

    def _pass_over(self, handler: Handler, asked: Sequence[Id]) -> None:
        """Enter the clients that are not asked as left out."""
        not_asked, barred = self.roster.not_asked, self.suspects.barred
        for client in (i for i in asked if i in not_asked):
            self.replies.pass_over(handler.name, client, "excluded", not_asked[client])
        rest = [i for i in asked if i not in not_asked]
        failed = [self.replies.pass_over(handler.name, i, "rejected", barred[i]) for i in rest if i in barred]
        if failed:
            self.quorum.check(self.step, handler.name, len(rest), failed)
