"""Simulated links of clients: rates and outages."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple, Self

from fewbytes.base.durations import parse_seconds
from fewbytes.base.errors import UserError
from fewbytes.base.units import parse_rate, plain

FORM = "rates, repeated over the clients, such as 10Mbps,1Mbps; 1Mbps-30s/10m fails for 30 s at the end of every 10 min"


class Link(NamedTuple):
    """A client's link, either way: bytes a second; seconds of each outage, which ends each period of `every` seconds
    (0: no outages)."""

    rate: float
    out: float = 0.0
    every: float = 0.0

    def arrives(self, start: float, count: int) -> float:
        """The time, in seconds since the run began, at which `count` bytes sent from `start` have arrived.

        >>> from fewbytes.core.links import Link
        >>> Link(100.0).arrives(2.0, 300), Link(100.0, out=4.0, every=10.0).arrives(5.0, 300)
        (5.0, 12.0)
        """
        if not self.out:
            return start + count / self.rate
        up = self.every - self.out
        before, within = divmod(start, self.every)
        total = before * up + min(within, up) + count / self.rate  # seconds without outages
        periods = max(0, math.ceil(total / up) - 1)
        return max(start, periods * self.every + (total - periods * up))

    def seconds(self, count: float) -> float:
        """The average duration of a transfer of `count` bytes."""
        return count / self.rate * (self.every / (self.every - self.out) if self.out else 1.0)


@dataclass(frozen=True)
class Links:
    """Clients' simulated links; the list is repeated over the clients."""

    each: tuple[Link, ...]

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse FORM; rates are rounded up to whole bytes a second. Raises UserError for anything else.

        >>> from fewbytes.core.links import Links
        >>> str(Links.read("10Mbps, 1Mbps-30s/10m"))
        '1250000B/s,125000B/s-30s/600s'
        >>> [link.rate for link in Links.read("10Mbps,1Mbps").of(3)]
        [1250000.0, 125000.0, 1250000.0]
        """
        return cls(tuple(map(_link, text.split(","))))

    def __str__(self) -> str:
        """The text that `read` accepts."""
        outages = [f"-{plain(link.out)}s/{plain(link.every)}s" if link.out else "" for link in self.each]
        return ",".join(f"{link.rate:.0f}B/s{away}" for link, away in zip(self.each, outages, strict=True))

    def of(self, clients: int) -> tuple[Link, ...]:
        """The link of each of `clients`."""
        return tuple(self.each[i % len(self.each)] for i in range(clients))


def _link(text: str) -> Link:
    match = re.fullmatch(r"([^-]+)(?:-([^/]+)/(.+))?", text)
    try:
        if match is None:
            raise UserError(text)
        rate = float(math.ceil(parse_rate(match[1])))
        out, every = (parse_seconds(match[2]), parse_seconds(match[3])) if match[2] else (0.0, 0.0)
    except UserError:
        raise UserError(f"links are {FORM}; not {text[:80]!r}") from None
    if out and out >= every:
        raise UserError(f"a link must work at times, and {text[:80]!r} fails for {out:g} of every {every:g} s")
    return Link(rate, out, every)
