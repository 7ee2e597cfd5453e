"""The first weights of each architecture, against which messages are coded."""

from __future__ import annotations

from typing import Any

from fewbytes.codec.first import First
from fewbytes.core.problem import Id, Problem


class Firsts:
    """The first weights of clients' models, computed once for each architecture."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[Any, First] = {}

    def of(self, client: Id) -> First:
        """Those of a client's model."""
        key = self._problem.architecture(client)
        if key not in self._known:
            self._known[key] = First(self._problem.first_state(client))
        return self._known[key]
