"""Simulated seconds that clients take for an exchange."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

from fewbytes.base.errors import UserError
from fewbytes.base.units import plain

FORM = "1,1,10 (seconds, one a client) or 10x (on the command line also a file with one a line)"


@dataclass(frozen=True)
class Speeds:
    """Each client's simulated seconds for an exchange; without `each`, from 1 to `spread`, evenly on a logarithmic
    scale, assigned at random. By default all take 1."""

    each: tuple[float, ...] = ()
    spread: float = 1.0

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse FORM, but no file. Raises UserError for anything else.

        >>> from fewbytes.core.speeds import Speeds
        >>> Speeds.read("1,1,10").seconds(3, seed=0), sorted(Speeds.read("4x").seconds(3, seed=0))
        ((1.0, 1.0, 10.0), [1.0, 2.0, 4.0])
        """
        if spread := re.fullmatch(r"\s*([0-9.]+)\s*x\s*", text):
            parsed = cls(spread=_number(spread[1], text))
            if parsed.spread >= 1:
                return parsed
            raise UserError(f"speeds are {FORM}, at least 1x; not {text!r}")
        return cls(tuple(_number(part, text) for part in text.split(",")))

    def __str__(self) -> str:
        """The text that `read` accepts."""
        return ",".join(map(plain, self.each)) if self.each else f"{plain(self.spread)}x"

    def check(self, clients: int) -> None:
        """Raises UserError unless there is one for each of `clients`."""
        if self.each and len(self.each) != clients:
            raise UserError(f"speeds are of {len(self.each)} clients, and there are {clients}: give one for each")

    def seconds(self, clients: int, seed: int) -> tuple[float, ...]:
        """The seconds of each of `clients`; randomness follows from a run's seed."""
        from fewbytes.base.streams import stream  # imports torch, which parsing settings does not need

        if self.each:
            return self.each
        steps = [round(self.spread ** (i / max(1, clients - 1)), 3) for i in range(clients)]
        return tuple(map(float, stream(seed, "speeds").permutation(steps)))


def _number(text: str, whole: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise UserError(f"speeds are {FORM}, all above 0; not {whole[:80]!r}")
    return number
