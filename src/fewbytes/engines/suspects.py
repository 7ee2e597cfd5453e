"""Finds the clients whose replies broke a step, which is repeated without them."""

from __future__ import annotations

from fewbytes.base.errors import one_line
from fewbytes.core.network import Handler
from fewbytes.core.problem import Id, Problem
from fewbytes.core.structures import Structures


class Suspects:
    """The structures of a step's replies, and the reply that the method was reading when it raised."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._looks = Structures()
        self.barred: dict[Id, str] = {}
        """Clients whose replies broke the current step, and why: it is repeated without them."""
        self.last: Id | None = None
        """The client whose reply the method is processing."""
        self.failed = False
        """Whether the engine itself, or a client's handler, raised the error."""

    def fresh(self) -> None:
        """Begin a new step, without suspects."""
        self.barred, self._looks = {}, Structures()

    def begin(self) -> None:
        """Begin, or repeat, the step."""
        self.last, self.failed = None, False

    def read(self, handler: Handler, client: Id, reply: object) -> None:
        """Note that the method receives a reply."""
        self.last = client
        self._looks.add(handler.name, self._problem.architecture(client), client, reply)

    def of(self, error: Exception, last: Id | None) -> list[Id]:
        """Bar and return the clients suspected of making the method's server half raise `error`: those whose replies
        have another structure than most, else the client of the `last` reply. Empty if no reply was the cause."""
        unusual = [*self._looks.odd(), *self._looks.outliers()]
        odd = sorted({i for i in unusual if i not in self.barred})
        suspected = odd or ([] if last is None else [last])
        self.barred |= dict.fromkeys(suspected, f"its reply broke the round: {one_line(error)}"[:300])
        return suspected

    def outliers(self) -> list[Id]:
        """Bar and return the clients whose replies in this step have other types than the others'."""
        outliers = {i: why for i, why in self._looks.outliers().items() if i not in self.barred}
        self.barred |= outliers
        return list(outliers)
