"""Rounds of a stated length: how many local steps each client takes, from the time that its earlier ones took."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fewbytes.core.ledger import OUTCOMES, Ledger
from fewbytes.core.problem import Id

LONGEST = 10  # maximum number of steps, in the method's own: with many more, clients go to optima of their own
MOST = 10**8  # maximum number of steps that a node may report


class RoundTime:
    """Chooses each client's number of local steps so that download, training and upload fit in `seconds` (None: no
    round time; methods take their own numbers of steps).

    A client's first exchange has the method's own number of steps. Each later one has as many as fit at the pace of its
    last: at least one, at most LONGEST times the method's own number.

    >>> from fewbytes.core.round_time import RoundTime
    >>> rounds = RoundTime(60.0)
    >>> rounds.steps(3)
    0
    >>> rounds.observe(3, steps=10, training=5.0, moving=20.0)
    >>> rounds.steps(3)
    80
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self.short: dict[Id, float] = {}
        """The seconds of an exchange with one step, of clients of which it takes longer than a round."""
        self._steps: dict[Id, int] = {}
        self._own: dict[Id, int] = {}  # of first exchanges

    def steps(self, client: Id) -> int | None:
        """The client's number of steps in its next exchange; 0: the method's own; None: no round time."""
        return None if self.seconds is None else self._steps.get(client, 0)

    def observe(self, client: Id, steps: int, training: float, moving: float) -> None:
        """Record an exchange: the client's steps, and seconds of training and of transfers. Ignores exchanges without
        training, and invalid values, which only an untrusted node sends."""
        if self.seconds is None or steps < 1 or not 0 < training < math.inf or not 0 <= moving < math.inf:
            return
        fits = (self.seconds - moving) / training * steps
        self.short.pop(client, None)
        if fits < 1:
            self.short[client] = moving + training / steps
        most = LONGEST * self._own.setdefault(client, steps)
        self._steps[client] = min(max(1, math.floor(fits + 1e-9)), most)

    def ends(self, ledger: Ledger) -> Iterator[tuple[Id, int, int]]:
        """For each client, its first exchange with training in the ledger of a resumed run, then its last: client,
        steps, bytes."""
        if self.seconds is None:
            return
        c = ledger.columns()
        rows = np.flatnonzero((c["steps"] > 0) & (c["outcome"] == OUTCOMES.index("answered")))
        moved = c["bytes_down"] + c["bytes_up"]
        first: dict[int, int] = {}
        for row in rows.tolist():
            first.setdefault(int(c["client"][row]), row)
        last = {int(c["client"][row]): row for row in rows.tolist()}
        for client in first:
            for row in (first[client], last[client]):
                yield client, int(c["steps"][row]), int(moved[row])
