"""The aggregation rule, if it is not the mean."""

from __future__ import annotations

from typing import Any

from fewbytes.core.rules import Rule
from fewbytes.engines.engine import Engine
from fewbytes.running.promises.promise import Promise


class Aggregate(Promise):
    """Sets the server's aggregation rule."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.terms = f", aggregate {rule}"

    def begin(self, engine: Engine) -> None:
        """Set the engine's rule."""
        engine.rule = self._rule

    def result_entries(self) -> dict[str, Any]:
        """The rule."""
        return {"aggregate": str(self._rule)}
