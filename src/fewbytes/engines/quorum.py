"""Sampling of clients, and the number of replies that a round needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from fewbytes.base.errors import MethodError, UserError
from fewbytes.core.ledger import LeftOut
from fewbytes.core.policy import Policy, TooFewReplies
from fewbytes.core.problem import Id
from fewbytes.core.step import Step
from fewbytes.engines.roster import Roster


class Quorum:
    """Samples clients and checks the number of replies. `over`: over-selection, as a fraction of the sample; `called`:
    a client's display name."""

    def __init__(self, policy: Policy, roster: Roster, called: Callable[[Id], str], over: float) -> None:
        self._policy, self._roster, self._called, self._over = policy, roster, called, over
        self._larger: tuple[Step | None, set[Id], int] = (None, set(), 0)  # over-selected sample, wanted size

    def sample(self, step: Step, fraction: float) -> list[Id]:
        """The step's sampled clients; see `Network.sample`."""
        if fraction not in step.cohorts:
            step.cohorts[fraction] = chosen = self._drawn(step, min(1.0, fraction * (1 + self._over)), fraction)
            if self._over:
                self._larger = step, set(chosen), max(1, round(fraction * len(self._roster.clients)))
        return step.cohorts[fraction]

    def _drawn(self, step: Step, fraction: float, asked: float) -> list[Id]:
        if not 0 < asked <= 1:
            raise MethodError(f"the fraction of clients to sample must be in (0, 1], got {asked}")
        clients = self._roster.clients
        count = max(1, round(fraction * len(clients)))
        if count == len(clients):
            return list(clients)
        return sorted(int(i) for i in step.rng.choice(clients, count, replace=False))

    def wanted(self, step: Step, asked: Collection[Id]) -> int:
        """The number of replies wanted from the asked clients: all, or fewer in an over-selected sample."""
        of, cohort, count = self._larger
        return count if of is step and set(asked) == cohort else len(asked)

    def check(self, step: Step, handler: str, asked: int, failed: Sequence[LeftOut], wanted: int | None = None) -> None:
        """Raises TooFewReplies if, after these failures, too few of the `wanted` replies (default: all asked) are
        possible; UserError if no client has answered yet and the failed nodes run something else than the server."""
        needed, left = math.ceil(self._policy.min_replies * (asked if wanted is None else wanted)), asked - len(failed)
        if left >= needed:
            return
        first, others = failed[0], [self._called(each.client) for each in failed[1:]]
        if not self._roster.has_replies and {each.client for each in failed} <= step.different:
            raise UserError(f"{self._called(first.client)} {first.why}")
        also = f", and {', '.join(others[:9])}{' …' if others[9:] else ''} too" if others else ""
        raise TooFewReplies(
            f"round {step.t}, handler {handler!r}: only {left} of {asked} clients can still answer, {needed} must "
            f"(--min-replies {self._policy.min_replies:g} of them); {self._called(first.client)} {first.outcome}: "
            f"{first.why}{also}; the run can be resumed"
        )
