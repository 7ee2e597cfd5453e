"""A run's engine, over any transport: the parts that the loop uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fewbytes.core.client_privacy import ClientPrivacy
from fewbytes.core.devices import prepare_device
from fewbytes.core.ledger import Ledger, LeftOut
from fewbytes.core.network import Network
from fewbytes.core.problem import Id
from fewbytes.core.rules import Rule
from fewbytes.core.step import Step
from fewbytes.engines.clock import Clock
from fewbytes.engines.dispatcher import Dispatcher
from fewbytes.engines.handlers import Handlers
from fewbytes.engines.quorum import Quorum
from fewbytes.engines.replies import Replies
from fewbytes.engines.requests import Outbox
from fewbytes.engines.scheduler import Scheduler
from fewbytes.engines.streaming import Streaming
from fewbytes.engines.suspects import Suspects
from fewbytes.engines.terms import Named, Origin, Terms
from fewbytes.engines.transport import Sites


class Engine:
    """Runs a method's calls on clients: steps, the roster, messages, and the acceptance of replies.

    `dispatcher`: sends jobs to clients. `sites`: knows where the clients are.
    """

    def __init__(self, terms: Terms, dispatcher: Dispatcher, sites: Sites, origin: Origin) -> None:
        self.method, self.task, self.problem = terms.method, terms.task, terms.task.problem
        prepare_device(self.problem.device, self.problem.precision)
        self.roster, self.sites, self.memory, self.nonce = dispatcher.roster, sites, dispatcher.memory, origin.nonce
        self.rule = Rule()
        """The aggregation rule, set by the loop."""
        self.privacy: ClientPrivacy | None = None
        """Client-level differential privacy that the server enforces, set by the loop; None: none."""
        over = 0.0 if terms.seconds is not None else terms.policy.over_selection
        quorum = Quorum(terms.policy, self.roster, sites.called, over)
        self.suspects = Suspects(self.problem)
        self.outbox = Outbox(terms, Handlers(terms.method), dispatcher)
        self.replies = Replies(terms, self.roster, self.outbox, Clock(terms))
        self.streaming = Streaming(self.outbox, self.replies, quorum, self.suspects)
        self.scheduler = Scheduler(terms, self.outbox, self.replies, quorum, self.suspects, self.streaming)
        self.network = Network(self.scheduler)
        """The network passed to the method's server half."""
        self._absent: tuple[int, list[LeftOut]] = 0, []  # a round, and the clients absent from it
        self.restore(origin)

    @property
    def step(self) -> Step:
        """The current step."""
        return self.replies.step

    @property
    def ledger(self) -> Ledger:
        """All exchanges of the run."""
        return self.replies.ledger

    def arrivals(self, t: int) -> list[Id]:
        """Clients present in round t that can take part and are new to the run, in ascending order."""
        arrived, absent = self.sites.arrivals(self.roster.due(t))
        self._absent = t, absent
        return arrived

    def fresh(self) -> None:
        """Begin a new step, without suspects."""
        self.suspects.fresh()
        self.roster.bar(self.ledger)

    def begin(self, t: int, scored: bool = True, *names: int | str) -> None:
        """Begin, or repeat, round t (0: before the first) or its step with these `names`."""
        self.replies.step = Step(self.problem, t, names, scored, self.rule, self.privacy)
        if t == self._absent[0] and not names:
            self.step.left_out += self._absent[1]
        self.suspects.begin()
        self.outbox.downlink.begin()
        self.memory.measure()

    def suspected(self, error: Exception) -> list[Id]:
        """The clients whose replies made the method's server half raise `error`; receives the pending replies first."""
        last, failed = self.suspects.last, self.suspects.failed
        self.scheduler.abandon()  # first, so that all replies have been seen
        return [] if failed else self.suspects.of(error, last)

    def restore(self, to: Origin) -> None:
        """Restore the run's state there; undoes what a repeated step has done to clients since."""
        self.roster.versions = dict(to.versions)
        self.outbox.restore(to)
        self.streaming.restore(to)

    def places(self, before: Named) -> list[Path]:
        """Files and folders to sync to disk, so that the next checkpoint survives a power failure; without those of the
        last checkpoint, `before`."""
        return [*self.outbox.waiting.places(before.messages), *self.sites.places(before.versions)]

    def checkpointed(self, kept: Sequence[Named]) -> None:
        """Remove files that no kept checkpoint names."""
        self.outbox.waiting.keep_only({number for named in kept for number in named.messages})
        self.sites.keep([named.versions for named in kept], self.streaming.busy)
