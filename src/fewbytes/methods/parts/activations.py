"""Counts how often elements of a model are critical, for the report (FedPURIN's Figures 5 and 6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fewbytes.base.state import State
from fewbytes.core.gallery import Shares
from fewbytes.core.problem import Id

WATCHED_CLIENTS = 20  # the first clients, whose masks are counted; as many as in the paper
WATCHED_ELEMENTS = 1 << 16  # per layer, the first ones


@dataclass
class Tally:
    """The number of rounds with a mask, and for each watched element the number of rounds in which it was one."""

    rounds: int = 0
    ones: State = field(default_factory=dict)

    def add(self, mask: Mapping[str, Tensor]) -> None:
        self.rounds += 1
        self.ones = {name: self.ones.get(name, 0) + m.int() for name, m in watched(mask).items()}

    def shares(self) -> State:
        return {name: count / self.rounds for name, count in self.ones.items()}


@dataclass
class Counts:
    """The counts: a server's state."""

    critical: dict[Id, Tally] = field(default_factory=dict)
    nonzero: Tally = field(default_factory=Tally)  # of Eq. 10's mean

    def counted(self, replies: Iterable[tuple[Id, Any]]) -> Iterator[tuple[Id, Any]]:
        """Yield the replies, and count the masks of their `theta`."""
        for i, reply in replies:
            if i < WATCHED_CLIENTS:
                self.critical.setdefault(i, Tally()).add(reply.theta.mask)
            yield i, reply

    def shares(self) -> Shares:
        """The shares of rounds to show, per client and for the server's mean."""
        clients = {f"client {i}": self.critical[i].shares() for i in sorted(self.critical)}
        return Shares(clients | {"server": self.nonzero.shares()})


def watched(state: Mapping[str, Tensor]) -> State:
    """The entries that Figures 5 and 6 show, flat: convolutions' first output kernel, the classifier's matrix."""
    matrices = [name for name, value in state.items() if value.dim() == 2]
    shown = {f"{name}[0]": value[0] for name, value in state.items() if value.dim() > 2}
    shown |= {name: state[name] for name in matrices[-1:]}
    return {name: value.flatten()[:WATCHED_ELEMENTS] for name, value in shown.items()}
