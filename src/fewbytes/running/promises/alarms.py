"""Reports clients whose updates are outliers in several rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fewbytes.core.policy import TooFewReplies
from fewbytes.core.problem import Id
from fewbytes.core.standing import FEWEST, Comparison
from fewbytes.engines.engine import Engine
from fewbytes.running.promises.promise import Phase, Promise, Row

LONG, FAR_TOO_LONG = 8.0, 20.0
"""Norms, in medians of all norms, of an outlier and of one reported at once. Honest clients reached at most 5, in 20
runs with a Dirichlet alpha of 0.1 to 1."""
AGAINST, SPREADS, LEAST_SPREAD = -0.1, 4.0, 0.05
"""A cosine to the others' mean below AGAINST is an outlier if it is SPREADS spreads below the others' median. A spread
is 1.48 median deviations, at least LEAST_SPREAD. If all clients differ, none is an outlier."""
WINDOW, OFTEN = 5, 3
"""A client is reported once it is an outlier in OFTEN of its last WINDOW rounds."""
KINDS = {
    "long": "sends updates far longer than the others'",
    "against": "points against the others (or has different data)",
}


class Alarms(Promise):
    """Observes the updates of each round. `named`: the reported clients, and how they stand out as of their last round;
    `since`: the round in which each did so first."""

    def __init__(self) -> None:
        self.named: dict[Id, str] = {}
        self.since: dict[Id, int] = {}
        self._first: dict[Id, int] = {}
        self._seen: dict[Id, list[str]] = {}
        self._called: Callable[[Id], str] = str

    def observe(self, round: int, updates: Mapping[Id, Comparison]) -> list[Id]:
        """Add a round's updates; returns the clients reported for the first time."""
        new = []
        for client, kind in standing_out(updates).items():
            seen = self._seen.setdefault(client, [])
            seen.append(kind)
            if kind:
                self._first.setdefault(client, round)
            last = [each.removeprefix("far too ") for each in seen[-WINDOW:]]
            for each, words in KINDS.items():
                if last.count(each) >= OFTEN or kind == f"far too {each}":
                    new += [] if client in self.named else [client]
                    self.since[client] = self._first[client]
                    self.named[client] = f"{words} in {last.count(each)} of {len(last)} rounds, last in round {round}"
        return new

    def recall(self, rows: Sequence[Row]) -> None:
        """Observe the updates of earlier lines."""
        for row in rows:
            self._observe_line(row)

    def _observe_line(self, row: Row) -> list[Id]:
        return self.observe(row["round"], {int(i): Comparison(*of) for i, of in row.get("updates", {}).items()})

    def begin(self, engine: Engine) -> None:
        """Get clients' display names."""
        self._called = engine.sites.called

    def row(self, phase: Phase) -> Row:
        """Each client's update compared with the others', to four digits."""
        updates = {str(i): [float(f"{part:.4g}") for part in each] for i, each in phase.updates().items()}
        return {"updates": updates} if updates else {}

    def notes(self, phase: Phase) -> Iterable[str]:
        """The clients that stand out for the first time."""
        for client in self._observe_line(phase.row) if phase.row else ():
            yield f"round {phase.round}: {self._called(client)} {self.named[client]}"

    def explain(self, error: Exception) -> str:
        """If too few clients can answer: those that stood out before."""
        if not isinstance(error, TooFewReplies) or not self.named:
            return ""
        who = "; ".join(f"{self._called(i)} {words}" for i, words in self.named.items())
        first, these = min(self.since.values()), ",".join(map(str, sorted(self.named)))
        return f" (before that {who}; continue without: --resume RUN --from-round {first - 1} --exclude {these})"

    def result_entries(self) -> dict[str, Any]:
        """The clients that stood out."""
        named = {str(client): words for client, words in sorted(self.named.items())}
        return {"stands_out": named} if named else {}


def standing_out(updates: Mapping[Id, Comparison]) -> dict[Id, str]:
    """How each client's update stands out in a round: `long`, `far too long`, `against`, or not (empty)."""
    found = {}
    for client, (length, cosine) in updates.items():
        others = [each for i, each in updates.items() if i != client]
        if len(others) < FEWEST - 1:
            return dict.fromkeys(updates, "")
        middle = statistics.median(each.cosine for each in others)
        spread = 1.4826 * statistics.median(abs(each.cosine - middle) for each in others)
        lowest = middle - SPREADS * max(spread, LEAST_SPREAD)
        against = cosine < min(AGAINST, lowest) and middle > -AGAINST
        long = "far too long" if length > FAR_TOO_LONG else "long" if length > LONG else ""
        found[client] = long or ("against" if against else "")
    return found
