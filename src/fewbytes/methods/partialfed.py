"""PartialFed-Fix: Sun, Huo, Yang, Bai, "PartialFed: Cross-Domain Personalized Federated Learning via Partial
Initialization", NeurIPS 2021.

A fixed part of the layers is loaded from the server's model before every local training; the others keep the client's
own last values. Clients train all layers and send the fixed part, which the server averages as in FedAvg. The part is
the last square convolution of each width, as inferred from GENE-FL's figures.

Bytes per client and round, before lossless coding: 4 A down and 4 A up, where A counts the values of that part.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fewbytes.base.ranges import Share
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import averaging
from fewbytes.methods.parts.averaging import GlobalModel, Model, Own, Trained
from fewbytes.models.layers import layers_of, square_layers
from fewbytes.wire import Dense


@dataclass(frozen=True)
class PartialFed(Method):
    """Hyper-parameters of local training; GENE-FL's values."""

    fraction: Share = 1.0
    local: Local = Local(epochs=10, lr=0.01, batch=64, momentum=0.9)

    promises = Promises(sends="a fixed part of its layers", headline="personalised", aggregates=EVERY_RULE, sums=True)

    def server(self, problem: Problem) -> GlobalModel:
        return averaging.first_shared(problem, last_square(problem.first_model()))

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
        return averaging.parameters_among(model, last_square(model))


def last_square(model: nn.Module) -> list[str]:
    """Names of the parameters of the last square convolution of each width."""
    last = {layers[-1] for layers in square_layers(model).values()}
    return [name for layer, names in layers_of(model).items() if layer in last for name in names]
