"""FedBN: Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
ICLR 2021.

The parameters and statistics of batch normalisation stay with each client, since clients' features may be distributed
differently; everything else is averaged as in FedAvg. All clients take part in every round.

Bytes per client and round, before lossless coding: 4 D down and 4 D up, where D counts the model's values without
batch normalisation.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fewbytes.base.ranges import Share
from fewbytes.base.state import own_entries, trained_entries
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import averaging
from fewbytes.methods.parts.averaging import GlobalModel, Model, Own, Trained
from fewbytes.wire import Dense


@dataclass(frozen=True)
class FedBN(Method):
    """Hyper-parameters of local training, with the values of the authors' code."""

    fraction: Share = 1.0
    local: Local = Local(epochs=1, lr=0.01, batch=32)

    promises = Promises(
        sends="its model without batch normalisation",
        headline="personalised",
        aggregates=EVERY_RULE,
        protects={"clients", "samples"},
        sums=True,
        keeps_own=True,
    )

    def server(self, problem: Problem) -> GlobalModel:
        return averaging.first_shared(problem, without_batch_norm(problem.first_model()))

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
        return averaging.parameters_among(model, without_batch_norm(model))


def without_batch_norm(model: nn.Module) -> list[str]:
    """Names of the model's parameters and buffers outside batch normalisation, and not marked as a client's own."""
    own = own_entries(model) | {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name in module.state_dict()
    }
    return [name for name in trained_entries(model) if name not in own]
