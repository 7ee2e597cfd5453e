"""FedFina: the last convolutions only; a baseline of GENE-FL (Section IV-A).

As PartialFed, with other layers: the last four convolutions larger than 1 x 1. They are loaded from the server's model
before every local training, trained with the rest, sent and averaged; all other layers stay with the client.

Bytes per client and round, before lossless coding: 4 A down and 4 A up, where A counts the values of those
convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fewbytes.base.ranges import Count, Share
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import averaging
from fewbytes.methods.parts.averaging import GlobalModel, Model, Own, Trained
from fewbytes.models.layers import hidden_layers, layers_of
from fewbytes.wire import Dense


@dataclass(frozen=True)
class FedFina(Method):
    """Hyper-parameters of FedFina; GENE-FL's values."""

    fraction: Share = 1.0
    local: Local = Local(epochs=10, lr=0.01, batch=64, momentum=0.9)
    convolutions: Count = 4  # number of last convolutions

    promises = Promises(sends="a fixed part of its layers", headline="personalised", aggregates=EVERY_RULE, sums=True)

    def server(self, problem: Problem) -> GlobalModel:
        return averaging.first_shared(problem, last_convolutions(problem.first_model(), self.convolutions))

    def client(self, site: Site) -> Own:
        return Own({})

    def round(self, state: GlobalModel, net: Network, t: int) -> None:
        replies = net.call(self.train, to=net.sample(self.fraction), send=Model(Dense(state.theta)))
        state.theta = averaging.means_over(state.theta, replies, net)

    def train(self, state: Own, message: Model, site: Site) -> Trained:
        return averaging.train_shared(state, message, site, self.local)

    def global_model(self, state: GlobalModel, problem: Problem) -> nn.Module | None:
        return averaging.whole_model(state, problem)

    def local_model(self, state: Own, site: Site) -> nn.Module | None:
        return averaging.own_model(state, site)

    def observed(self, model: nn.Module) -> list[str]:
        return averaging.parameters_among(model, last_convolutions(model, self.convolutions))


def last_convolutions(model: nn.Module, count: int) -> list[str]:
    """Names of the parameters of the last `count` convolutions larger than 1 x 1."""
    last = hidden_layers(model)[-count:]
    return [name for layer, names in layers_of(model).items() if layer in last for name in names]
