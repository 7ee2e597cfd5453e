"""The rules by which a server puts together what clients send, by name: the mean, and those that bear some liars."""

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
    "trimmed-mean": 0.2,  # the part trimmed at either end, below a half
    "krum": 1,  # f, how many clients may lie
    "multi-krum": 1,
    "norm-clip": None,  # the largest norm of an update; none: the median of the round's
    "geometric-median": None,
}
"""Every rule, and the number it has if none is given."""
ENTRY_RULES = frozenset({"median", "trimmed-mean", "norm-clip"})
"""Those that need no more of an entry than the values of who sent it."""
VOTES = frozenset({"median", "trimmed-mean"})
"""Those by which a value is what those in the middle say of it."""
VECTOR_RULES = frozenset({"krum", "multi-krum", "norm-clip", "geometric-median"})
"""Those that take what a client sent as one vector: its many zeros, if it has some, do not outvote values."""
CLIPPING = frozenset({"norm-clip"})
"""What also bears on means other than the plain one."""
EVERY_RULE = ENTRY_RULES | VECTOR_RULES
"""Every rule but the mean."""


@dataclass(frozen=True)
class Rule:
    """One of `NUMBERS`, and its number, if it has one."""

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
            "aggregate is mean, median, trimmed-mean=PART (below 0.5), krum=LIARS, multi-krum=LIARS, norm-clip, "
            f"norm-clip=NORM or geometric-median, not {text!r}"
        )

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name}={self.number}"

    @property
    def largest(self) -> float | None:
        """The largest norm of an update, if it has one."""
        return self.number if self.name == "norm-clip" else None

    @property
    def replies(self) -> int:
        """How many replies it needs: Krum 2 f + 3 (Blanchard et al. 2017)."""
        return 2 * int(self.number or 0) + 3 if self.name in ("krum", "multi-krum") else 1

    def tolerating_fewer(self, refused: int) -> Self:
        """Krum, where so many liars have been found out and refused; other rules as they are."""
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
                f"aggregate {self} needs {self.replies} clients, and there are {clients}: take {self.instead}"
            )

    @property
    def instead(self) -> str:
        """What to do where there are too few replies for it."""
        return f"more clients a round, {self.name} of fewer liars, or median"
