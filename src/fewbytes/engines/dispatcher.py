"""Sends jobs over a transport and waits for answers, in the order asked or as they arrive."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from fewbytes.core.problem import Id
from fewbytes.engines.handlers import Job
from fewbytes.engines.roster import Roster
from fewbytes.engines.terms import Origin, Terms
from fewbytes.engines.transport import Answer, Transport

WINDOW = 8  # answers polled at a time; the transport keeps the others
AWAITED_SECONDS = 20.0  # after which the watcher learns which clients are awaited
NOT_THERE = Answer("unreachable", "its node is not connected")
Order = tuple[Job, Sequence[bytes]]
"""A job and the frames sent with it."""


@dataclass
class Flight:
    """A request in flight: its client, its job (None: the client was unreachable), its deadline and its answer.
    `ended`: when the answer came, on the simulated clock."""

    client: Id
    job: Job | None
    deadline: float
    answer: Answer | None = None
    ended: float = 0.0

    @property
    def asked(self) -> Job:
        """The job of a client that was reachable."""
        assert self.job is not None
        return self.job

    @property
    def came(self) -> Answer:
        """The answer, after it has arrived."""
        assert self.answer is not None
        return self.answer


class Dispatcher:
    """Sends jobs and waits for answers, at most `patience` seconds (default: no limit)."""

    def __init__(
        self, transport: Transport, roster: Roster, terms: Terms, origin: Origin, patience: float = math.inf
    ) -> None:
        self.transport, self.roster, self.patience = transport, roster, patience
        self.uplink, self.round_time, self.save_every = terms.uplink, terms.round_time, terms.save_every
        self.memory = Memory(transport.processes)
        self.on_awaited: Callable[[list[Id]], None] = lambda clients: None
        """Called once per call with the clients that are still awaited after AWAITED_SECONDS."""
        self._numbers = itertools.count((origin.starts << 40) + 1)  # above all numbers used before

    def next_number(self) -> int:
        """A number that no job or message of this run has used."""
        return next(self._numbers)

    def job(self, handler: str, client: Id, t: int, scored: bool) -> Job:
        """A job for a client that starts from its last accepted state."""
        version, rate = self.roster.versions.get(client, 0), self.uplink.rate(client)
        steps = None if handler.startswith(":") else self.round_time.steps(client)
        number, every = self.next_number(), self.save_every
        return Job(number, handler, client, t, scored, version, rate=rate, steps=steps, save_every=every)

    def ask(
        self, handler: str, clients: Sequence[Id], t: int, scored: bool = False, call: int = 0, frame: bytes = b""
    ) -> Iterator[tuple[Id, Answer]]:
        """Run one of the engine's own handlers on clients; yields answers in the order asked."""
        frames = [frame] if frame else []
        for flight in self.in_order(clients, lambda i: (self.job(handler, i, t, scored), frames), call):
            yield flight.client, flight.came
            self.end([flight])

    def launch(self, client: Id, order: Callable[[Id], Order], call: int, deadline: float | None = None) -> Flight:
        """Send a client its order; `order` is called only if the client is reachable."""
        deadline = time.monotonic() + self.patience if deadline is None else deadline
        if not self.transport.reaches(client):
            return Flight(client, None, deadline, NOT_THERE)
        job, frames = order(client)
        sent = self.transport.submit(job, frames, call)
        return Flight(client, job, deadline, None if sent else NOT_THERE)

    def in_order(
        self, asked: Sequence[Id], order: Callable[[Id], Order], call: int, enough: int | None = None
    ) -> Generator[Flight]:
        """Ask clients, at most the transport's `ahead` in advance; yields flights in the order asked. The reader ends
        each flight. Closing the generator cancels the others.

        If `enough` is below the number of clients, the first `enough` answers count and the rest are surplus.
        """
        began = time.monotonic()
        choosing = enough is not None and enough < len(asked)
        ahead = len(asked) if choosing else self.transport.ahead
        flights: deque[Flight] = deque()
        awaited = math.inf if math.isinf(self.patience) else began + AWAITED_SECONDS
        try:
            for turn in range(len(asked)):
                for client in asked[turn + len(flights) : turn + ahead]:
                    flights.append(self.launch(client, order, call, began + self.patience))
                if choosing and not turn:
                    self._first(enough or 0, flights)
                while flights[0].answer is None:
                    self._look([flight for flight in flights if flight.answer is None][:WINDOW], WINDOW)
                    if time.monotonic() > awaited:
                        awaited = math.inf
                        if silent := [flight.client for flight in flights if flight.answer is None]:
                            self.on_awaited(silent)
                yield flights.popleft()
        except GeneratorExit:
            self.end(flights)
            raise

    def _first(self, enough: int, flights: Sequence[Flight]) -> None:
        """Wait until `enough` clients have answered, then mark the pending flights as surplus."""
        while pending := [flight for flight in flights if flight.answer is None]:
            if sum(flight.came.outcome == "answered" for flight in flights if flight.answer is not None) >= enough:
                for flight in pending:
                    flight.answer = Answer("surplus", "others answered first")
                return
            self._look(pending, len(pending))

    def first(self, flights: Sequence[Flight]) -> Flight:
        """Wait for an answer; returns the first flight in the list that has one."""
        while True:
            for flight in flights:
                if flight.answer is not None:
                    return flight
            self._look(flights, WINDOW)

    def end(self, flights: Sequence[Flight]) -> None:
        """Release these answers, and stop waiting for those that are missing."""
        self.transport.end([flight.job for flight in flights if flight.job is not None])

    def _look(self, flights: Sequence[Flight], most: int) -> None:
        """Poll for answers to these, at most `most`; flights past their deadline become late."""
        pending = {flight.job.number: flight for flight in flights if flight.job is not None}
        jobs = [flight.job for flight in pending.values() if flight.job is not None]
        for number, answer in self.transport.poll(jobs, most).items():
            pending.pop(number).answer = answer
        self.memory.measure()
        now = time.monotonic()
        for flight in pending.values():
            if now >= flight.deadline:
                flight.answer = Answer("late", f"no reply within {self.patience:g} s")


class Memory:
    """The peak memory of a group of processes, shared pages counted once."""

    def __init__(self, processes: Callable[[], list[int]]) -> None:
        self.peak = 0  # bytes
        self._processes, self._again = processes, 0.0

    def measure(self) -> None:
        """Update the peak; takes at most half a percent of the time."""
        started = time.monotonic()
        if started >= self._again:
            self.peak = max(self.peak, sum(map(memory_bytes, self._processes())))
            now = time.monotonic()
            self._again = now + 200 * (now - started)


def memory_bytes(pid: int) -> int:
    """A process's proportional share of memory in bytes; 0 where the system does not report it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return 0
