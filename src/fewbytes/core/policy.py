"""Which replies an exchange needs and refuses, and an engine's waiting times on Flower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from msgspec import Meta

from fewbytes.base.errors import FewbytesError, UserError
from fewbytes.base.ranges import Count, Positive, Share, Whole
from fewbytes.base.settings import Group, reads_text, setting

ABSENT = "data"
"""Reason for leaving a client out of a whole round: its node is missing, or its data do not fit the run. It was not
asked, and is in no exchange."""


class Excluded(frozenset[int]):
    """Numbers of clients that are not asked."""

    @classmethod
    def read(cls, text: str) -> Self:
        """`3,7`. Raises UserError for anything else."""
        numbers = [number for number in text.split(",") if number]
        if not all(number.strip().isdecimal() for number in numbers):
            raise UserError(f"exclude takes clients' numbers with commas, like 3,7, not {text!r}")
        return cls(map(int, numbers))

    def __str__(self) -> str:
        return ",".join(map(str, sorted(self)))


@reads_text
@dataclass(frozen=True)
class Policy(Group):
    """Which replies an exchange needs and refuses, and its waiting times on Flower. Raises UserError for values out of
    range.

    >>> import fewbytes as fb
    >>> policy = fb.Policy(min_replies=0.8, exclude="7,3")
    >>> str(policy.exclude), policy.retries
    ('3,7', 5)
    """

    title: ClassVar[str] = "Clients that fail"
    given: ClassVar[str] = "fb.run(…, policy=fb.Policy({}))"

    min_replies: Share = setting(
        0.5, "Fraction of the asked clients that must answer with finite numbers, or the run stops.", resumable=True
    )
    round_timeout: Positive = setting(3600.0, "Flower: seconds an exchange waits for its clients.", resumable=True)
    over_selection: Annotated[float, Meta(ge=0, le=10)] = setting(
        0.0, "Flower: sample this fraction more clients than needed; the first to answer are used.", resumable=True
    )
    connect_timeout: Positive = setting(
        300.0, "Flower: seconds to wait for all clients at the start; later ones join between rounds.", resumable=True
    )
    retries: Whole = setting(
        5, "Flower: how often to retry a round with too few answers, after 1, 2, 4, … seconds.", resumable=True
    )
    max_norm: Positive = setting(
        1e6, "Maximum norm of a reply, in norms of the first model (or 1); larger replies are left out.", resumable=True
    )
    strikes: Count = setting(
        3, "Number of rounds in a row with refused replies after which a client is no longer asked.", resumable=True
    )
    exclude: Excluded | None = setting(None, "Comma-separated numbers of clients that are not asked.", resumable=True)

    def check(self, clients: int) -> None:
        """Raises UserError if it excludes unknown clients, or all of them."""
        if unknown := sorted(i for i in self.excluded if i >= clients):
            raise UserError(f"exclude names client {unknown[0]}, and there are clients 0 to {clients - 1}")
        if len(self.excluded) == clients:
            raise UserError("exclude names every client: at least one must take part")

    @property
    def excluded(self) -> frozenset[int]:
        """The clients that are not asked."""
        return self.exclude or frozenset()


class TooFewReplies(FewbytesError):
    """Fewer clients answered than the policy requires; the run can resume from its last checkpoint."""
