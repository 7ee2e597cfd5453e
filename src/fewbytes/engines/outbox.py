"""What is on its way to clients: numbered, rounded to what they hold, beside what waits for their next request."""

from __future__ import annotations

from fewbytes.core.network import Handler
from fewbytes.core.problem import Id
from fewbytes.engines.dispatcher import Dispatcher
from fewbytes.engines.downlink import Downlink, Letter
from fewbytes.engines.handlers import Handlers
from fewbytes.engines.requests import Request
from fewbytes.engines.terms import Origin, Terms
from fewbytes.engines.waiting import WaitingMessages


class Outbox:
    """Makes the requests of a run, which knows what clients hold and what waits for them."""

    def __init__(self, terms: Terms, handlers: Handlers, dispatcher: Dispatcher) -> None:
        self.handlers, self.dispatcher, self._folder = handlers, dispatcher, terms.waiting
        self.downlink = Downlink(terms.downlink, terms.task.problem, terms.coded)
        self.waiting = WaitingMessages(terms.waiting, handlers.named)
        self.put, self.free = dispatcher.transport.put, dispatcher.transport.free
        self.next_number = dispatcher.next_number

    def take_over(self, origin: Origin) -> None:
        """Stand as the run stood there. Raises UserError if a message that waits is gone or damaged."""
        self.waiting = WaitingMessages(self._folder, self.handlers.named, origin.waiting)
        self.downlink.go_back(origin.lines, origin.heard)

    def waiting_for(self, client: Id) -> list[tuple[Handler, Letter]]:
        """What waits for a client, in the order its handlers are to run."""
        return self.waiting.of(client)

    def delivered(self, client: Id, request: Request) -> None:
        """A client has had all of its request."""
        self.downlink.arrived(client, request.stands)
        for part in request.parts:
            self.waiting.delivered(part.handler, client)
