"""A run's engine: the parts that the loop works with, over any transport."""

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
from fewbytes.engines.dispatcher import Dispatcher
from fewbytes.engines.handlers import Handlers
from fewbytes.engines.quorum import Quorum
from fewbytes.engines.replies import Replies
from fewbytes.engines.requests import Outbox
from fewbytes.engines.scheduler import Scheduler
from fewbytes.engines.streaming import Clock, Streaming
from fewbytes.engines.suspects import Suspects
from fewbytes.engines.terms import Named, Origin, Terms
from fewbytes.engines.transport import Sites


class Engine:
    """Runs a method's calls on clients: steps, what is known of clients, what travels, and which replies are taken.

    `dispatcher`: how jobs get to clients; `sites`: what is known of the places where those are.
    """

    def __init__(self, terms: Terms, dispatcher: Dispatcher, sites: Sites, origin: Origin) -> None:
        self.method, self.task, self.problem = terms.method, terms.task, terms.task.problem
        prepare_device(self.problem.device, self.problem.precision)
        self.roster, self.sites, self.memory, self.nonce = dispatcher.roster, sites, dispatcher.memory, origin.nonce
        self.rule = Rule()
        """What the server takes of clients' replies where it takes a mean; the loop says it."""
        self.privacy: ClientPrivacy | None = None
        """What the run promises its clients, if the server keeps it; the loop says it."""
        over = 0.0 if terms.seconds is not None else terms.policy.over_selection
        quorum = Quorum(terms.policy, self.roster, sites.called, over)
        self.suspects = Suspects(self.problem)
        self.outbox = Outbox(terms, Handlers(terms.method), dispatcher)
        self.replies = Replies(terms, self.roster, self.outbox)
        self.streaming = Streaming(self.outbox, self.replies, quorum, self.suspects, Clock(terms.seconds))
        self.scheduler = Scheduler(terms, self.outbox, self.replies, quorum, self.suspects, self.streaming)
        self.network = Network(self.scheduler)
        """What the method's server half is given."""
        self._absent: tuple[int, list[LeftOut]] = 0, []  # a round, and who takes no part in it
        self.restore(origin)

    @property
    def step(self) -> Step:
        """What is being taken."""
        return self.replies.step

    @property
    def ledger(self) -> Ledger:
        """Every exchange of the run."""
        return self.replies.ledger

    def arrivals(self, t: int) -> list[Id]:
        """Clients that are there for round t and can take part, but are not known to the run yet, ascending."""
        arrived, absent = self.sites.arrivals(self.roster.due(t))
        self._absent = t, absent
        return arrived

    def fresh(self) -> None:
        """A new step begins, of which nobody's reply has broken anything yet."""
        self.suspects.fresh()
        self.roster.bar(self.ledger)

    def begin(self, t: int, scored: bool = True, *names: int | str) -> None:
        """Take round t (0: before the first) or the step of it that `names` name, perhaps again."""
        self.replies.step = Step(self.problem, t, names, scored, self.rule, self.privacy)
        if t == self._absent[0] and not names:
            self.step.left_out += self._absent[1]
        self.suspects.begin()
        self.outbox.downlink.begin()
        self.memory.measure()

    def suspected(self, error: Exception) -> list[Id]:
        """Whose replies made the method's server half raise `error`; what is still on its way is received."""
        last, failed = self.suspects.last, self.suspects.failed
        self.scheduler.abandon()  # before it is decided who is suspected: by then all replies have been looked at
        return [] if failed else self.suspects.of(error, last)

    def restore(self, to: Origin) -> None:
        """Stand as the run stood there: what a step that is taken again has done to clients since is forgotten."""
        self.roster.versions = dict(to.versions)
        self.outbox.restore(to)
        self.streaming.restore(to)

    def places(self, before: Named) -> list[Path]:
        """What must be on the disk for what a checkpoint is about to name to survive a loss of power: files and
        folders, but for what the last one named."""
        return [*self.outbox.waiting.places(before.messages), *self.sites.places(before.versions)]

    def checkpointed(self, kept: Sequence[Named]) -> None:
        """The run can go on from what each kept checkpoint names: other files may go."""
        self.outbox.waiting.keep_only({number for named in kept for number in named.messages})
        self.sites.keep([named.versions for named in kept], self.streaming.busy)
