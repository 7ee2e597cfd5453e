"""Checks each reply before it reaches the method, and enters it in the ledger."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fewbytes.base.errors import FrameError, MethodError, cleaned
from fewbytes.base.files import private_folder, replacing
from fewbytes.core.admission import GROWTH, Expected, admit, finite_norm, norm
from fewbytes.core.ledger import Ledger, LeftOut, Row
from fewbytes.core.metrics import possible
from fewbytes.core.network import Handler
from fewbytes.core.problem import Id
from fewbytes.core.records import Records
from fewbytes.core.round_time import MOST
from fewbytes.core.step import Step
from fewbytes.engines.clock import Clock
from fewbytes.engines.dispatcher import Flight
from fewbytes.engines.handlers import UP_BITS, Done, unchanged
from fewbytes.engines.requests import Outbox, Request
from fewbytes.engines.roster import Roster
from fewbytes.engines.terms import Terms
from fewbytes.engines.transport import Answer
from fewbytes.wire import Counted, Frame, counted, unpack
from fewbytes.wire.schema import leaves_of

SHORTEST = 1e-3  # minimum seconds assumed for a transfer
MARGIN = 64 << 20  # bytes of arrays that a reply may have beyond sixteen times the model
Check = Callable[[Id, Any], None]
"""A method's own check of a reply; see `Network.call`."""


class Replies:
    """Checks the replies of a run, and enters its exchanges."""

    def __init__(self, terms: Terms, roster: Roster, outbox: Outbox, clock: Clock) -> None:
        self.clock, self.round_time = clock, terms.round_time
        self.ledger = Ledger()
        """All exchanges of the run."""
        self.step = Step(terms.task.problem)
        """The current step, which gathers the replies' records."""
        self.on_reply: Callable[[Id], None] = lambda client: None
        """Called with each client whose reply was accepted (for a progress display)."""
        self._problem, self._policy, self._uplink = terms.task.problem, terms.policy, terms.uplink
        promises = terms.method.promises
        self._hidden, self._any_norm = promises.hides, promises.describes or promises.evaluates
        self._roster, self._outbox = roster, outbox
        self._frames = terms.folder / "frames" if terms.keep_frames else None
        self._bounded: dict[Any, tuple[float, int]] = {}

    def received(
        self, handler: Handler, flight: Flight, request: Request | None, check: Check | None = None
    ) -> Any | LeftOut:
        """A client's reply, or why it was left out; enters either in the ledger."""
        answer = flight.came
        try:
            if answer.outcome == "answered" and request is not None and flight.job is not None:
                value = self._settled(handler, flight, request, check)
                self.on_reply(flight.client)
                return value
        except FrameError as error:
            answer = answer._replace(outcome="rejected", why=cleaned(str(error)))
        finally:
            self._outbox.dispatcher.end([flight])
        if answer.done.error and (first := answer.done.first):
            self._outbox.downlink.forget(flight.client, first)
        if answer.different and flight.client not in self._roster.unable:
            self.step.different.add(flight.client)
        return self._left_out(handler.name, flight.client, request, answer)

    def pass_over(self, handler: str, client: Id, outcome: str, why: str, request: Request | None = None) -> LeftOut:
        """Enter in the ledger that a client is left out without waiting for an answer."""
        return self._left_out(handler, client, request, Answer(outcome, why))

    def _settled(self, handler: Handler, flight: Flight, request: Request, check: Check | None) -> Any:
        """The decoded reply; enters its exchange in the ledger. Raises FrameError, without an entry, for a reply that
        is damaged, far larger than the model, not finite, or that the client may not send."""
        job, answer = flight.asked, flight.came
        if answer.done.version not in (job.version, job.version + 1):
            version, asked = answer.done.version, job.version
            raise FrameError("header", f"it has state version {version}, expected version {asked}")
        unchanged(*(part.base for part in request.parts))
        value = None
        if handler.reply is not None:
            value = self._admitted(handler, handler.reply, job.client, request, answer.frame)
            if check is not None:
                try:
                    check(job.client, value)
                except MethodError as error:
                    raise FrameError("values", str(error)) from None
            layout = self._problem.layout(job.client)
            self.step.updates.add(handler.name, job.client, layout, request.message, value)
        self._enter(handler, flight, request, counted(value))
        return value

    def _admitted(self, handler: Handler, kind: type[Any], client: Id, request: Request, frame: memoryview) -> Any:
        """The decoded reply, after checks of its type, size, norm and contents."""
        layout, statistics = self._problem.layout(client), self._problem.statistics(client)
        base, (most, limit) = request.base, self._bounds(client)
        value = unpack(kind, frame, layout=layout, base=base, limit=limit)
        leaves = leaves_of(value)
        try:
            size = finite_norm(leaves, self._problem.objective.hint)
        except FrameError:
            self.step.not_finite.add(handler.name)
            raise
        tensors = {} if base is None else base.tensors
        known = self._roster.samples_of(client), self._roster.classes_of(client)
        norms = most / self._policy.max_norm, most
        growth = math.inf if self._problem.objective.any_scale else max(GROWTH, self._policy.max_norm / GROWTH)
        admit(
            leaves, size, Expected(layout, statistics, request.message, tensors, *known, *norms, growth, self._hidden)
        )
        return value

    def _bounds(self, client: Id) -> tuple[float, int]:
        """The maximum norm, and bytes of arrays, of a client's replies."""
        key = self._problem.architecture(client)
        if key not in self._bounded:
            first = self._problem.first_state(client)
            size = sum(value.nbytes for value in first.values())
            most = math.inf if self._any_norm else self._policy.max_norm * max(1.0, norm(first.values()))
            self._bounded[key] = most, 16 * size + MARGIN
        return self._bounded[key]

    def _enter(self, handler: Handler, flight: Flight, request: Request, up: Counted) -> None:
        """Enter an accepted reply: its frames, state version, records and ledger row."""
        step, client, answer = self.step, flight.client, flight.came
        done, length = answer.done, len(answer.frame)
        steps = 0 if self.round_time.seconds is None else min(max(0, done.records.steps), MOST)
        seconds = flight.ended if self.clock.entered else 0.0
        self._keep_request(handler.name, client, request)
        self._keep(client, handler.name, "up", answer.frame)
        self._roster.versions[client], self._roster.has_replies = done.version, True
        self._outbox.delivered(client, request)
        step.records.add(client, done.records)
        if received := possible(done.validation, self._problem.objective.metrics):
            step.received[client] = received
        step.records.add(client, Records(measures=request.measured))
        row = Row(step.t, handler.name, client, request.length, length, request.counted, up, "answered", steps, seconds)
        self.ledger.add(row)
        self._note_pace(client, steps, request.length + length, answer)
        self._note_speed(client, done, request.length + length, answer.moving)

    def _note_speed(self, client: Id, done: Done, moved: int, moving: float | None) -> None:
        """Note a client's link speed (bytes and seconds), which may set how finely its replies are rounded."""
        rate = None if moving is None else moved / max(moving, SHORTEST)
        self._uplink.observe(client, done.seconds, done.rounded, rate)
        if self._uplink.picks and client in (picked := self.step.records.measures.get(UP_BITS, {})):
            ends = dict.fromkeys(f"{end:.2g}" for end in (min(picked.values()), max(picked.values())))
            self.step.note("clients sent what their links move while they train", f"{' to '.join(ends)} bits a value")

    def _note_pace(self, client: Id, steps: int, moved: int, answer: Answer) -> None:
        """Note how long a client took for its steps and its transfers, which may set its next number of steps."""
        training, moving = answer.done.seconds, max(0.0, answer.moving or 0.0)
        if self.clock.simulated:
            training, moving = self.clock.training(client, steps), self.clock.moving(client, moved)
        self.round_time.observe(client, steps, training, moving)
        if self.round_time.short:
            what = "the round time is shorter than an exchange with one local step: raise it"
            short = self.round_time.short.values()
            self.step.note(what, f"{len(short)} clients, of which one takes {max(short):.3g} s")

    def resume(self, ledger: Ledger) -> None:
        """Set the ledger of a resumed run; clients then take as many steps as it shows, or as fit by it."""
        self.ledger = ledger
        for client, steps, moved in self.round_time.ends(ledger):
            training, moving = self.round_time.seconds or 0.0, 0.0
            if self.clock.simulated:
                training, moving = self.clock.training(client, steps), self.clock.moving(client, moved)
            self.round_time.observe(client, steps, training, moving)

    def _left_out(self, handler: str, client: Id, request: Request | None, answer: Answer) -> LeftOut:
        """Enter an exchange without a valid reply; its bytes still count."""
        left = LeftOut(client, handler, answer.outcome, answer.why)
        self.step.left_out.append(left)
        down, counts = (0, Counted()) if request is None else (request.length, request.counted)
        self._keep_request(handler, client, request)
        length = len(answer.frame)
        self.ledger.add(Row(self.step.t, handler, client, down, length, counts, Counted(), answer.outcome))
        return left

    def _keep_request(self, handler: str, client: Id, request: Request | None) -> None:
        for part in () if request is None else request.parts:
            beside = part.handler if part.waited else "origin" if part.kind == "origin" else ""
            self._keep(client, f"{handler}.{beside}" if beside else handler, "down", part.frame)

    def _keep(self, client: Id, handler: str, way: str, frame: memoryview | Frame | None) -> None:
        """Keep a frame as a file, if `keep_frames` is set."""
        if self._frames is not None and frame is not None and len(frame):
            private_folder(self._frames)
            with replacing(self._frames / f"{self.step.t}-{handler}-{client}-{way}.frame") as file:
                file.write(bytes(frame))
