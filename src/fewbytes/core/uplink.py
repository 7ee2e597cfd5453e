"""Bits per value in clients' replies: fixed, or as many as their links can send while they train."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

from fewbytes.base.errors import UserError
from fewbytes.base.rate import FEWEST, MOST, Rate
from fewbytes.base.units import parse_rate, plain

RANGE = f"{FEWEST:g} to {MOST:g}"
FORM = f"a number from {RANGE}, or auto=RATE, a client's uplink, e.g. auto=1MB/s, or, on Flower, auto"
CHOSEN = 0.3, 8.0  # bits a value, the fewest and the most that are chosen for a client
FIRST = 2.0  # for a client without measured seconds
WEIGHT = 0.5  # weight of the last exchange in the averages of a client's seconds and link


@dataclass(frozen=True)
class UplinkBits:
    """`bits` per value; or, if that is 0, as many as fit a link of `rate` bytes a second (None: measured)."""

    bits: float = 0.0
    rate: float | None = None

    @classmethod
    def read(cls, text: str | float) -> Self:
        """Parse FORM; rates are rounded to whole bytes a second. Raises UserError for anything else.

        >>> from fewbytes.core.uplink import UplinkBits
        >>> UplinkBits.read("2.5"), str(UplinkBits.read("auto=8Mbit/s"))
        (UplinkBits(bits=2.5, rate=None), 'auto=1000000B/s')
        """
        if match := re.fullmatch(r"\s*auto\s*(?:=(.*))?", str(text)):
            return cls(rate=None if match[1] is None else float(math.ceil(parse_rate(match[1]))))
        try:
            bits = float(text)
        except ValueError:
            bits = 0.0
        if not FEWEST <= bits <= MOST:
            raise UserError(f"uplink_bits is {FORM}; not {text!r}")
        return cls(bits)

    def __str__(self) -> str:
        """The text that `read` accepts."""
        if self.bits:
            return plain(self.bits)
        return "auto" if self.rate is None else f"auto={self.rate:.0f}B/s"


@dataclass
class _Seen:
    """Averages of a client: seconds of training, values in its reply, and bytes a second of its link."""

    seconds: float
    values: int
    rate: float | None


class Uplink:
    """The precision of each client's replies: fixed, or chosen from `observe`'s measurements so that sending one takes
    as long as making it; then results depend on measured seconds."""

    def __init__(self, bits: UplinkBits | None = None, step: float = 0.0) -> None:
        self.fixed = Rate(0.0 if bits is None else bits.bits, step)
        self._auto = None if bits is None or bits.bits else bits
        self._seen: dict[int, _Seen] = {}

    @property
    def picks(self) -> bool:
        """Whether it uses measurements."""
        return self._auto is not None

    def rate(self, client: int) -> Rate:
        """The precision of the client's next reply."""
        if self._auto is None:
            return self.fixed
        seen = self._seen.get(client)
        link = None if seen is None else self._auto.rate or seen.rate
        if seen is None or link is None:
            return Rate(FIRST)
        least, most = CHOSEN
        return Rate(min(max(8 * link * seen.seconds / seen.values, least), most))

    def observe(self, client: int, seconds: float, values: int, rate: float | None) -> None:
        """Record an exchange: seconds the client took for its reply, values it rounded, and bytes a second on its link,
        either way (None: unknown). Ignores invalid values, which only an untrusted node sends.
        """
        if self._auto is None or values < 1 or not 0 <= seconds < math.inf:
            return
        before = self._seen.get(client)
        if before is not None:
            seconds = WEIGHT * seconds + (1 - WEIGHT) * before.seconds
            rate = before.rate if rate is None else WEIGHT * rate + (1 - WEIGHT) * (before.rate or rate)
        self._seen[client] = _Seen(seconds, values, rate)
