"""How often elements of a model are critical, for people (FedPURIN's Figures 5 and 6); changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fewbytes.base.state import State
from fewbytes.core.gallery import Shares
from fewbytes.core.problem import Id

WATCHED_CLIENTS = 20  # whose masks are counted: the first ones, as many as the paper has
WATCHED_ELEMENTS = 1 << 16  # of a layer: the first ones


@dataclass
class Tally:
    """In how many rounds there was a mask, and in how many of them each watched element was a one of it."""

    rounds: int = 0
    ones: State = field(default_factory=dict)

    def add(self, mask: Mapping[str, Tensor]) -> None:
        self.rounds += 1
        self.ones = {name: self.ones.get(name, 0) + m.int() for name, m in watched(mask).items()}

    def shares(self) -> State:
        return {name: count / self.rounds for name, count in self.ones.items()}


@dataclass
class Counts:
    """What was counted, a server's state."""

    critical: dict[Id, Tally] = field(default_factory=dict)
    nonzero: Tally = field(default_factory=Tally)  # of Eq. 10's mean

    def counted(self, replies: Iterable[tuple[Id, Any]]) -> Iterator[tuple[Id, Any]]:
        """Replies whose `theta` has a mask, as they come."""
        for i, reply in replies:
            if i < WATCHED_CLIENTS:
                self.critical.setdefault(i, Tally()).add(reply.theta.mask)
            yield i, reply

    def shares(self) -> Shares:
        """What is shown: of each client, and of the server's mean."""
        clients = {f"client {i}": self.critical[i].shares() for i in sorted(self.critical)}
        return Shares(clients | {"server": self.nonzero.shares()})


def watched(state: Mapping[str, Tensor]) -> State:
    """What Figures 5 and 6 show, flat: of convolutions the first output kernel; the last matrix, the classifier's."""
    matrices = [name for name, value in state.items() if value.dim() == 2]
    shown = {f"{name}[0]": value[0] for name, value in state.items() if value.dim() > 2}
    shown |= {name: state[name] for name in matrices[-1:]}
    return {name: value.flatten()[:WATCHED_ELEMENTS] for name, value in shown.items()}
