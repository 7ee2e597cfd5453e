"""A run's differential privacy, as written in settings."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal, Self

from fewbytes.base.errors import UserError
from fewbytes.base.units import plain

Protected = Literal["clients", "samples"]
FORM = "epsilon=8,delta=1e-5,clip=1.0, of=samples if not of clients, noise=seeded if not secure"


@dataclass(frozen=True)
class Privacy:
    """A run's privacy guarantee: adding or removing one of `of` changes the likelihood of all releases by at most a
    factor of e^epsilon, plus delta. `clip`: the maximum norm of a client's update, or of a sample's gradient."""

    epsilon: float
    delta: float
    clip: float
    of: Protected = "clients"
    noise: Literal["secure", "seeded"] = "secure"  # seeded: from the run's public seed

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse FORM, in any order. Raises UserError for anything else.

        >>> from fewbytes.core.promise import Privacy
        >>> Privacy.read("epsilon=8, delta=1e-5, clip=1")
        Privacy(epsilon=8.0, delta=1e-05, clip=1.0, of='clients', noise='secure')
        """
        given = dict(part.strip().partition("=")[::2] for part in text.split(","))
        try:
            privacy = cls(**{key: float(value) if key in ("epsilon", "delta", "clip") else value
                          for key, value in given.items()})  # type: ignore[arg-type]  # fmt: skip
        except (TypeError, ValueError):
            raise UserError(f"dp is {FORM}; not {text!r}") from None
        known = privacy.of in ("clients", "samples") and privacy.noise in ("secure", "seeded")
        positive = 0 < privacy.epsilon < math.inf and 0 < privacy.clip < math.inf and 0 < privacy.delta < 1
        if not (known and positive) or len(given) != text.count(",") + 1:
            raise UserError(f"dp is {FORM}, epsilon and clip above 0, delta between 0 and 1; not {text!r}")
        return privacy

    def __str__(self) -> str:
        usual = [f"{name}={plain(getattr(self, name))}" for name in ("epsilon", "delta", "clip")]
        of = ["of=samples"] if self.of == "samples" else []
        return ",".join(of + usual + (["noise=seeded"] if self.noise == "seeded" else []))

    def check(self, method: str, protects: Set[str]) -> None:
        """Raises UserError for a method, by name, that `protects` nobody, or others."""
        if self.of not in protects:
            remedy = "promise it of clients" if protects else "leave dp out"
            raise UserError(f"dp of {self.of}: {method} sends values without noise: {remedy}, or use fedavg")
