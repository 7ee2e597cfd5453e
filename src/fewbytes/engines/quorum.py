"""Who is asked in a round, and how many of them must answer."""

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
    """Draws cohorts, larger by the part `over` than a method asks for, and counts replies; `called`: a client as people
    know it."""

    def __init__(self, policy: Policy, roster: Roster, called: Callable[[Id], str], over: float) -> None:
        self._policy, self._roster, self._called, self._over = policy, roster, called, over
        self._larger: tuple[Step | None, set[Id], int] = (None, set(), 0)  # a cohort, and how many of it are wanted

    def sample(self, step: Step, fraction: float) -> list[Id]:
        """The step's cohort; see `Network.sample`."""
        if fraction not in step.cohorts:
            step.cohorts[fraction] = chosen = self._drawn(step, min(1.0, fraction * (1 + self._over)), fraction)
            if self._over:
                self._larger = step, set(chosen), max(1, round(fraction * len(self._roster.clients)))
        return step.cohorts[fraction]

    def _drawn(self, step: Step, fraction: float, asked: float) -> list[Id]:
        if not 0 < asked <= 1:
            raise MethodError(f"a cohort is a fraction in (0, 1] of the clients, got {asked}")
        clients = self._roster.clients
        count = max(1, round(fraction * len(clients)))
        if count == len(clients):
            return list(clients)
        return sorted(int(i) for i in step.rng.choice(clients, count, replace=False))

    def wanted(self, step: Step, asked: Collection[Id]) -> int:
        """How many of those asked are to answer: fewer than all of a cohort that was drawn larger."""
        of, cohort, count = self._larger
        return count if of is step and set(asked) == cohort else len(asked)

    def check(self, step: Step, handler: str, asked: int, failed: Sequence[LeftOut], wanted: int | None = None) -> None:
        """Raises TooFewReplies if with these `failed` of those asked too few of `wanted` (default: all) can answer;
        UserError where their nodes run something else than the server, if no client has answered yet."""
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
