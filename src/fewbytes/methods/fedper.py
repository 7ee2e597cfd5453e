"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv 1912.00818,
2019; as FedPURIN's evaluation runs it.

The model is a base and a personalisation layer: here the classifier, its last layer. Clients train both. Only the base
is sent and averaged as in FedAvg, w_B <- sum_k (n_k / n) w_B^k; every classifier stays with its client, which also
draws its initial weights. Batch normalisation's parameters belong to the base; its statistics stay on the client.

Bytes per client and round, before lossless coding: 4 D_B down, 4 D_B up, where D_B counts the base's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import Share
from fewbytes.base.state import state_of, trained_entries, trained_parameters
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.averaging import GlobalModel, Model, Own, Trained, first_shared, parameters_among
from fewbytes.models.layers import classifier
from fewbytes.wire import Dense


@dataclass(frozen=True)
class FedPer(Method):
    """Hyper-parameters of FedPer, with the values of FedPURIN's evaluation."""

    fraction: Share = 1.0
    local: Local = Local(epochs=5, lr=0.1, batch=100, momentum=0.9)
    buffers: Literal["averaged", "local"] = "local"  # batch-norm statistics

    promises = Promises(
        sends="its model without the classifier",
        headline="personalised",
        aggregates=EVERY_RULE,
        protects={"clients", "samples"},
        sums=True,
    )

    def server(self, problem: Problem) -> GlobalModel:
        return first_shared(problem, self.base(problem.first_model()))

    def base(self, model: nn.Module) -> list[str]:
        """Names of the entries that are sent. Raises UserError if there are none."""
        own = classifier(model)
        shared = trained_entries(model) if self.buffers == "averaged" else trained_parameters(model)
        base = [name for name in shared if name not in own]
        if not base:
            raise UserError("the model has one layer, which FedPer keeps with the clients: nothing is left to share")
        return base

    def client(self, site: Site) -> Own:
        """The classifier, drawn by the client."""
        model = site.model(fresh=True)
        return Own(state_of(model, keep=classifier(model).__contains__))

    def round(self, state: GlobalModel, net: Network, t: int) -> None:
        mean = net.mean(state.theta)
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=Model(Dense(state.theta))):
            mean.add(reply.theta.dense(), weight=reply.samples)
        state.theta = mean()

    def train(self, state: Own, message: Model, site: Site) -> Trained:
        base = message.theta.dense()
        model = site.model(state.theta | base)
        site.fit(model, self.local)
        state.theta = state_of(model)
        return Trained(Dense({name: state.theta[name] for name in base}), len(site.train))

    def local_model(self, state: Own, site: Site) -> nn.Module:
        return site.model(state.theta)

    def observed(self, model: nn.Module) -> list[str]:
        return parameters_among(model, self.base(model))
