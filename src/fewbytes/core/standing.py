"""Comparison of clients' updates: each one's relative norm, and its direction relative to the others."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbytes.core.problem import Id
from fewbytes.wire.fields import entries_in
from fewbytes.wire.layout import Layout

SAMPLED = 1 << 12
"""About this many values of an update are compared: of larger ones every second, third, … value."""
MOST_TIMES = 4.0
"""Maximum divisor of a length for a client's many samples, a number its own node reports. Honest updates grow about as
its root: with 50 times the samples they are 12 to 30 times as long at first, then less."""
FEWEST = 4
"""Minimum number of clients for a comparison."""


class Comparison(NamedTuple):
    """A client's update relative to the others: its norm, in medians of all norms on the same entries, and its cosine
    to the mean of theirs."""

    length: float
    cosine: float


Found = dict[Id, dict[str, Tensor]]
"""Updates by client and entry."""


class Updates:
    """The updates in replies since the round began, by handler, call and client; `values`: in a whole model."""

    def __init__(self, values: int) -> None:
        self._stride = max(1, values // SAMPLED)
        self._found: dict[str, dict[int, Found]] = {}
        self._sent: tuple[Any, dict[str, Tensor]] = None, {}  # the last message, often for many clients, and its values
        self.call = 0
        """The current call's number: replies are only compared within a call, as others may be other clusters'."""

    def add(self, handler: str, client: Id, layout: Layout, sent: Any, reply: Any) -> None:
        """Add a reply's update: its difference to `sent` (None: nothing), by entry of the client's model; entries that
        were not sent count from 0. Other numbers, such as means of classes, are not updates."""
        if sent is not self._sent[0]:
            self._sent = sent, {name: self._places(value) for name, value in entries_in(sent).items()}
        values = {n: v for n, v in entries_in(reply).items() if n in layout.index and v.is_floating_point()}
        found = {name: self._places(value) for name, value in values.items()}
        starts = {name: start for name, start in self._sent[1].items() if name in found}
        found = {name: places for name, places in found.items() if starts.get(name, places).shape == places.shape}
        if moved := [name for name in found if name in starts]:
            updates = torch._foreach_sub([found[name] for name in moved], [starts[name] for name in moved])
            found |= zip(moved, updates, strict=True)
        if found:
            self._found.setdefault(handler, {}).setdefault(self.call, {})[client] = found

    def _places(self, value: Tensor) -> Tensor:
        flat = value.detach() if value.dim() == 1 else value.detach().reshape(-1)
        return (flat[:: self._stride] if flat.numel() > 4 * self._stride else flat).float()

    def comparisons(self, samples: Callable[[Id], int | None] = lambda _: None) -> dict[Id, Comparison]:
        """Each client's comparison with the others, for the handler with the most values, on entries sent by at least
        FEWEST clients; empty if there are none.

        `samples`: a client's number of training samples, if known. Clients with more take more steps and move farther:
        a length is divided by the root of the ratio to the median number, at most by MOST_TIMES.
        """
        each = [list(calls.values()) for calls in self._found.values()]
        found = {i: one for clients in max(each, key=_values, default=[]) for i, one in _compared(clients).items()}
        counts = {i: count for i in found if (count := samples(i))}
        usual = statistics.median(counts.values()) if counts else 1.0
        times = {i: min(MOST_TIMES, max(1.0, count / usual) ** 0.5) for i, count in counts.items()}
        return {i: Comparison(length / times.get(i, 1.0), cosine) for i, (length, cosine) in found.items()}


def _values(calls: Sequence[Found]) -> int:
    return sum(len(value) for clients in calls for found in clients.values() for value in found.values())


def _compared(clients: Found) -> dict[Id, Comparison]:
    senders = Counter((name, len(value)) for found in clients.values() for name, value in found.items())
    shared = dict(each for each, count in senders.items() if count >= FEWEST)
    if not shared:
        return {}
    rows = torch.zeros(len(clients), sum(shared.values()))
    has = torch.zeros(len(clients), len(shared), dtype=torch.bool)
    for at, client in enumerate(sorted(clients)):
        found = clients[client]
        pieces = rows[at].split(list(shared.values()))
        for e, ((name, size), piece) in enumerate(zip(shared.items(), pieces, strict=True)):
            if name in found and len(found[name]) == size:
                piece.copy_(found[name])
                has[at, e] = True
    squares = torch.stack([part.sum(1) for part in rows.square().split(list(shared.values()), 1)], 1).double()
    usual = squares.masked_fill(~has, torch.nan).nanmedian(0).values.masked_fill(~has, 0).sum(1)
    lengths = torch.where(usual > 0, squares.sum(1) / usual, 1).sqrt()
    products = (rows @ rows.T).double()
    own, along = products.diagonal(), products.sum(1) - products.diagonal()
    others = (products.sum() - 2 * products.sum(1) + own).clamp(min=0)  # squared norm of the sum of the others' updates
    cosines = (along / (own.clamp(min=0) * others).sqrt().clamp(min=1e-30)).clamp(-1, 1)
    return {i: Comparison(*of) for i, *of in zip(sorted(clients), lengths.tolist(), cosines.tolist(), strict=True)}
