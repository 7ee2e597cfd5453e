"""Separate: every client trains its own model on its own data, and nothing is sent.

The baseline that a federated method must beat to be worth its bytes. Each client draws its own initial weights.

Bytes per client and round: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fewbytes.base.state import State, state_of
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.promises import Promises
from fewbytes.core.site import Site
from fewbytes.core.training import Local


@dataclass
class Own:
    """A client's state."""

    theta: State  # its model


@dataclass(frozen=True)
class Separate(Method):
    """Hyper-parameters of local training."""

    local: Local = Local(epochs=5, lr=0.1, batch=100, momentum=0.9)

    promises = Promises(sends="nothing", headline="personalised", keeps_own=True)

    def client(self, site: Site) -> Own:
        return Own(state_of(site.model(fresh=True)))

    def round(self, state: None, net: Network, t: int) -> None:
        net.tell(self.train)

    def train(self, state: Own, message: None, site: Site) -> None:
        model = site.model(state.theta)
        site.fit(model, self.local)
        state.theta = state_of(model)

    def local_model(self, state: Own, site: Site) -> nn.Module:
        return site.model(state.theta)
