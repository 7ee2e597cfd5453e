"""The method's headline score: a note reports if nothing computes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fewbytes.base.errors import listed
from fewbytes.core.method import Method
from fewbytes.running.promises.promise import Phase, Promise, Row


class Headline(Promise):
    """Collects the kinds of scores."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._kinds: dict[str, None] = {}

    def recall(self, rows: Sequence[Row]) -> None:
        """Add the kinds of earlier lines."""
        for row in rows:
            self._kinds |= dict.fromkeys(kind for of in row["scores"].values() for kind in of)

    def notes(self, phase: Phase) -> Iterable[str]:
        """At the end, a note if the headline score is missing; not all tasks have both global and personalised."""
        self._kinds |= dict.fromkeys(kind for of in phase.scores.values() for kind in of)
        name, headline = self._method.method_name, self._method.promises.headline
        if phase.phase == "finish" and self._kinds and headline not in (*self._kinds, "global", "personalised"):
            yield (
                f"{name} names {headline!r} as its headline score, which nothing computes: there are "
                f"{listed(list(self._kinds))}"
            )
