"""Whose replies an exchange needs, and how long an engine on Flower waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fewbytes.base.errors import FewbytesError
from fewbytes.base.ranges import Positive, Share
from fewbytes.base.settings import Group, setting


@dataclass(frozen=True)
class Policy(Group):
    """Whose replies an exchange needs, and on Flower waits for. Raises UserError for values out of range."""

    title: ClassVar[str] = "Clients that fail"

    min_replies: Share = setting(
        0.5, "Part of the clients asked that must answer with finite numbers, or the run stops.", resumable=True
    )
    round_timeout: Positive = setting(3600.0, "Flower: seconds an exchange waits for its clients.", resumable=True)
    over_selection: Annotated[float, Meta(ge=0, le=10)] = setting(
        0.0, "Flower: ask a cohort this part larger; the first to answer are taken.", resumable=True
    )
    connect_timeout: Positive = setting(
        300.0, "Flower: seconds the start waits for all clients; who comes later joins between rounds.", resumable=True
    )


class TooFewReplies(FewbytesError):
    """Fewer clients answered than the policy asks for; the run can go on from its last checkpoint."""
