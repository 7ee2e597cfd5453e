"""The simulated clock: when clients, of their speeds and over their links, have answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fewbytes.core.links import Link
from fewbytes.core.problem import Id
from fewbytes.core.training import steps_of
from fewbytes.engines.terms import Terms


class Clock:
    """Simulated seconds since a run began. Without `seconds` in the terms, time is real, and this clock stands still.

    A client's exchange takes its seconds, those of its link for the bytes of its request and of its reply, and more or
    less as it takes more or fewer steps than the method's own number.
    """

    def __init__(self, terms: Terms) -> None:
        self.now = 0.0
        self.entered = terms.timed
        """Whether the times of replies are entered in the ledger."""
        self._seconds: Sequence[float] | None = terms.seconds
        self._links: Sequence[Link] = terms.links
        self._own: Callable[[Id], int] = lambda i: steps_of(
            terms.method.local,  # type: ignore[attr-defined]  # of every method whose steps a run sets
            len(terms.task.data.clients[i].train),
        )

    @property
    def simulated(self) -> bool:
        """Whether this clock determines when clients answer."""
        return self._seconds is not None

    def training(self, client: Id, steps: int = 0) -> float:
        """A client's seconds for a number of steps (0: the method's own)."""
        seconds = 0.0 if self._seconds is None else self._seconds[client]
        return seconds * steps / max(1, self._own(client)) if steps else seconds

    def moving(self, client: Id, count: int) -> float:
        """The average duration of a transfer of `count` bytes on a client's link."""
        return self._links[client].seconds(count) if self._links else 0.0

    def trained(self, client: Id, start: float, down: int, steps: int = 0) -> float:
        """When a client that is sent `down` bytes at `start` has trained."""
        return self.arrives(client, start, down) + self.training(client, steps)

    def arrives(self, client: Id, start: float, count: int) -> float:
        """When `count` bytes that a client's link carries from `start` have arrived."""
        return self._links[client].arrives(start, count) if self._links else start
