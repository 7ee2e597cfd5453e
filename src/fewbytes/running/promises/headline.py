"""The kind of score that a method is judged by: a note reports if nothing scores it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fewbytes.base.errors import listed
from fewbytes.core.method import Method
from fewbytes.running.promises.promise import Phase, Promise, Row


class Headline(Promise):
    """Gathers which kinds are scored."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._kinds: dict[str, None] = {}

    def recall(self, rows: Sequence[Row]) -> None:
        """Those of earlier lines."""
        for row in rows:
            self._kinds |= dict.fromkeys(kind for of in row["scores"].values() for kind in of)

    def notes(self, phase: Phase) -> Iterable[str]:
        """At the end, that the method's own is not among them; not all tasks have both global and personalised."""
        self._kinds |= dict.fromkeys(kind for of in phase.scores.values() for kind in of)
        name, headline = self._method.method_name, self._method.promises.headline
        if phase.phase == "finish" and self._kinds and headline not in (*self._kinds, "global", "personalised"):
            yield (
                f"{name} is to be judged by {headline!r} (its headline), which nothing scores: there are "
                f"{listed(list(self._kinds))}"
            )
