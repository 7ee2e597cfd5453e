"""A run's aggregates of clients' states: the mean, a robust rule's result, or a noisy mean."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fewbytes.base.errors import MethodError, with_article
from fewbytes.base.state import EntryMeans, Mean, State
from fewbytes.core.aggregation import RobustMean, norm_clipped, vote
from fewbytes.core.client_privacy import ClientPrivacy, PrivateMean
from fewbytes.core.network import Vote
from fewbytes.core.privacy import Bytes
from fewbytes.core.rules import VOTES, Rule


@dataclass(frozen=True)
class Means:
    """Aggregation by a run's rule, or under its privacy of clients; see `Network`.

    `refused`: number of clients whose replies were refused in this step, or who are no longer asked. `release`: counts
    a noisy mean, and returns the number of clients asked and the source of noise.
    """

    rule: Rule
    privacy: ClientPrivacy | None
    refused: Callable[[], int]
    release: Callable[[], tuple[int, Bytes]]

    def mean(self, around: State | None) -> Mean | RobustMean | PrivateMean:
        """See `Network.mean`."""
        _check_around(around)
        if self.privacy is not None:
            return PrivateMean(self.privacy, around, self.release)
        return Mean() if self.rule == Rule() else RobustMean(self.rule, around, self.refused)

    def entry_means(self, around: State | None, few: bool) -> EntryMeans | RobustMean | PrivateMean:
        """See `Network.entry_means`."""
        _check_around(around)
        if self.privacy is not None:
            return PrivateMean(self.privacy, around, self.release)
        return EntryMeans() if self.rule == Rule() else RobustMean(self.rule, around, self.refused, few)

    def clipped(self, states: Sequence[State]) -> Sequence[State]:
        """See `Network.clipped`."""
        return states if self.rule == Rule() else norm_clipped(states, {}, self.rule.largest)

    def votes(self) -> Vote | None:
        """See `Network.votes`."""
        return functools.partial(vote, part=self.rule.number) if self.rule.name in VOTES else None


def _check_around(around: State | None) -> None:
    if around is not None and not isinstance(around, Mapping):
        raise MethodError(
            "net.mean takes the clients' message, tensors by name (then mean.add(state, weight) for each reply, and "
            f"mean()), not {with_article(type(around))}"
        )
