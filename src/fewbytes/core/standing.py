"""Whose updates are unlike the others': how long each is, and whether it points where theirs do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbytes.core.admission import entries_of
from fewbytes.core.problem import Id
from fewbytes.wire.layout import Layout

SAMPLED = 1 << 14
"""About so many values of an update are looked at: every second, third, … where there are more."""
FEWEST = 4
"""Of fewer clients nobody's update is compared."""


class Beside(NamedTuple):
    """A client's update beside the others': its norm, and its cosine to the mean of theirs."""

    norm: float
    cosine: float


class Updates:
    """The updates in the replies since a round began, by handler and client; `values`: of a whole model."""

    def __init__(self, values: int) -> None:
        self._stride = max(1, values // SAMPLED)
        self._found: dict[str, dict[Id, dict[str, Tensor]]] = {}

    def add(self, handler: str, client: Id, layout: Layout, sent: Any, reply: Any) -> None:
        """What a reply adds to what was `sent` (None: nothing), by entry of the client's model; one that was not sent
        counts from 0. Other numbers, such as means of classes, are no updates."""
        before, known = _entries(sent), {entry.name for entry in layout.entries}
        found: dict[str, Tensor] = {}
        for name, value in _entries(reply).items():
            start = before.get(name)
            if name in known and value.is_floating_point() and (start is None or start.shape == value.shape):
                found[name] = self._places(value) - (0 if start is None else self._places(start))
        if found:
            self._found.setdefault(handler, {})[client] = found

    def _places(self, value: Tensor) -> Tensor:
        flat = value.detach().reshape(-1)
        return (flat[:: self._stride] if len(flat) > self._stride * self._stride else flat).float()

    def beside(self) -> dict[Id, Beside]:
        """Each client's beside the others', of the handler of which most is sent; empty for fewer than FEWEST."""
        every = [clients for clients in self._found.values() if len(clients) >= FEWEST]
        if not every:
            return {}
        clients = max(every, key=lambda of: max(sum(map(len, found.values())) for found in of.values()))
        sizes = {name: len(value) for found in clients.values() for name, value in found.items()}
        rows = torch.zeros(len(clients), sum(sizes.values()))
        for row, client in zip(rows, sorted(clients), strict=True):
            found = clients[client]
            pieces = row.split(list(sizes.values()))
            for name, piece in zip(sizes, pieces, strict=True):
                if name in found and len(found[name]) == len(piece):
                    piece.copy_(found[name])
        products = (rows @ rows.T).double()
        own, along = products.diagonal(), products.sum(1) - products.diagonal()
        norms = own.clamp(min=0).sqrt()
        others = (products.sum() - 2 * products.sum(1) + own).clamp(min=0).sqrt()  # of the sum of the others'
        cosines = (along / (norms * others).clamp(min=1e-30)).clamp(-1, 1)
        return {i: Beside(*of) for i, *of in zip(sorted(clients), norms.tolist(), cosines.tolist(), strict=True)}


def _entries(payload: Any) -> Mapping[str, Tensor]:
    """The tensors in a payload's wire values, by name."""
    found: dict[str, Tensor] = {}
    for f in dataclasses.fields(payload) if dataclasses.is_dataclass(payload) else ():
        found |= entries_of(getattr(payload, f.name))
    return found
