"""The rule by which the server puts replies together, where that is not the mean."""

from __future__ import annotations

from typing import Any

from fewbytes.core.method import Method
from fewbytes.core.rules import Rule
from fewbytes.engines.base import Engine
from fewbytes.running.promises.promise import Promise


class Aggregate(Promise):
    """What the server takes in place of the mean of so many `clients`. Raises UserError for a rule that the method does
    not take."""

    def __init__(self, rule: Rule, method: Method, clients: int) -> None:
        rule.check(method.method_name, method.promises.aggregates, clients)
        self._rule = rule
        self.terms = f", aggregate {rule}"

    def begin(self, engine: Engine) -> None:
        """Say so."""
        engine.rule = self._rule

    def told(self) -> dict[str, Any]:
        """The rule."""
        return {"aggregate": str(self._rule)}
