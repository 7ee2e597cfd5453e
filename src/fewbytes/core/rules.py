"""Aggregation rules by name: the mean, and robust rules that tolerate some malicious clients."""

from __future__ import annotations

import math
import re
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Self

from fewbytes.base.errors import UserError

NUMBERS: dict[str, float | None] = {
    "mean": None,
    "median": None,
    "trimmed-mean": 0.2,  # the fraction trimmed at either end, below a half
    "krum": 1,  # f, the number of malicious clients
    "multi-krum": 1,
    "norm-clip": None,  # the maximum norm of an update; None: the median of the round's
    "geometric-median": None,
}
"""All rules, with the default of each one's number."""
ENTRY_RULES = frozenset({"median", "trimmed-mean", "norm-clip"})
"""Rules that need only the values of an entry's senders."""
VOTES = frozenset({"median", "trimmed-mean"})
"""Rules whose value is decided by the clients in the middle."""
VECTOR_RULES = frozenset({"krum", "multi-krum", "norm-clip", "geometric-median"})
"""Rules that treat a client's entries as one vector, so that its zeros, however many, do not outvote values."""
CLIPPING = frozenset({"norm-clip"})
"""Rules that also apply to means other than the plain one."""
EVERY_RULE = ENTRY_RULES | VECTOR_RULES
"""All rules except the mean."""


@dataclass(frozen=True)
class Rule:
    """One of `NUMBERS`, and its number, if any."""

    name: str = "mean"
    number: float | None = None

    @classmethod
    def read(cls, text: str) -> Self:
        """`median`, `trimmed-mean=0.2`, `krum=2`, `norm-clip=1.5`. Raises UserError for anything else.

        >>> from fewbytes.core.rules import Rule
        >>> str(Rule.read("trimmed-mean")), Rule.read("krum=2").replies
        ('trimmed-mean=0.2', 7)
        """
        name, equals, number = (part.strip() for part in text.partition("="))
        usual = NUMBERS.get(name)
        if name in NUMBERS and not equals:
            return cls(name, usual)
        if name in ("krum", "multi-krum") and re.fullmatch("[0-9]{1,9}", number, re.ASCII):
            return cls(name, int(number))
        if name in ("trimmed-mean", "norm-clip") and re.fullmatch(r"[0-9.]+(e-?[0-9]+)?", number, re.ASCII):
            value = float(number) if number.count(".") < 2 and number != "." else math.inf
            if 0 < value < (0.5 if name == "trimmed-mean" else math.inf):
                return cls(name, value)
        raise UserError(
            "aggregate is mean, median, trimmed-mean=PART (below 0.5), krum=F, multi-krum=F (F malicious clients), "
            f"norm-clip, norm-clip=NORM or geometric-median, not {text!r}"
        )

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name}={self.number}"

    @property
    def largest(self) -> float | None:
        """The maximum norm of an update, if any."""
        return self.number if self.name == "norm-clip" else None

    @property
    def replies(self) -> int:
        """The number of replies it needs: Krum 2 f + 3 (Blanchard et al. 2017)."""
        return 2 * int(self.number or 0) + 3 if self.name in ("krum", "multi-krum") else 1

    def tolerating_fewer(self, refused: int) -> Self:
        """Krum with f reduced by the refused malicious clients; other rules unchanged."""
        if self.name not in ("krum", "multi-krum"):
            return self
        return replace(self, number=max(0, int(self.number or 0) - refused))

    def check(self, method: str, takes: Set[str], clients: int) -> None:
        """Raises UserError for a method, by name, that `takes` other rules only, and for too few clients."""
        if self.name == "mean":
            return
        if self.name not in takes:
            others = ", ".join(name for name in NUMBERS if name in takes and name != "mean")
            why = f"takes mean, {others}" if others else "takes no plain mean of single replies: leave it out"
            raise UserError(f"aggregate {self}: the server of {method} {why}")
        if clients < self.replies:
            raise UserError(
                f"aggregate {self} needs {self.replies} clients, and there are {clients}: use {self.instead}"
            )

    @property
    def instead(self) -> str:
        """The alternatives if there are too few replies for it."""
        return f"more clients a round, {self.name} for fewer malicious clients, or median"
