"""Whose replies broke a step: it is taken again without them."""

from __future__ import annotations

from fewbytes.base.errors import one_line
from fewbytes.core.network import Handler
from fewbytes.core.problem import Id, Problem
from fewbytes.core.structures import Structures


class Suspects:
    """What the replies of a step look like, and which was being read when something broke."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._looks = Structures()
        self.barred: dict[Id, str] = {}
        """Whose replies broke the step that is taken, why: it is taken again without them."""
        self.last: Id | None = None
        """Whose reply the method was given last, and works on."""
        self.failed = False
        """Whether it was the engine itself, or a client's handler, that raised."""

    def fresh(self) -> None:
        """A new step begins, of which nobody's reply has broken anything yet."""
        self.barred, self._looks = {}, Structures()

    def begin(self) -> None:
        """The step is taken, perhaps again."""
        self.last, self.failed = None, False

    def read(self, handler: Handler, client: Id, reply: object) -> None:
        """The method is given a reply."""
        self.last = client
        self._looks.add(handler.name, self._problem.architecture(client), client, reply)

    def of(self, error: Exception, last: Id | None) -> list[Id]:
        """The clients whose replies must have made the method's server half raise `error`, from now on `barred`: those
        of another shape than most of the step's, or the one it was given `last`. None if it was no reply."""
        odd_or_outlying = [*self._looks.odd(), *self._looks.outliers()]
        odd = sorted({i for i in odd_or_outlying if i not in self.barred})
        suspected = odd or ([] if last is None else [last])
        self.barred |= dict.fromkeys(suspected, f"its reply broke the round: {one_line(error)}"[:300])
        return suspected

    def outliers(self) -> list[Id]:
        """The clients whose replies were in this step of other types than the others', from now on `barred`."""
        outliers = {i: why for i, why in self._looks.outliers().items() if i not in self.barred}
        self.barred |= outliers
        return list(outliers)
