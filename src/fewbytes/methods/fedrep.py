"""FedRep: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated
Learning", ICML 2021, Algorithm 1.

A model has a body, the shared representation phi, and a head h_i of each client: here the classifier, its last layer. A
client first trains its head with the received body, then the body with the trained head. Only the body is sent, and the
server takes the plain mean, phi <- 1 / |S| sum_i phi_i. Clients draw their own initial heads.

Bytes per client and round, before lossless coding: 4 D_phi down, 4 D_phi up, where D_phi counts the body's values (with
batch-norm buffers).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, Self

from torch import nn

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import MODEL, SENT, Count, Share
from fewbytes.base.state import state_of, trained_entries, trained_parameters
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.averaging import GlobalModel, Own, first_shared, parameters_among
from fewbytes.models.layers import classifier
from fewbytes.wire import Dense, payload


@payload
class Body:
    """In either direction: phi."""

    theta: Annotated[Dense, SENT, MODEL]


@dataclass(frozen=True)
class FedRep(Method):
    """Hyper-parameters of FedRep."""

    fraction: Share = 1.0  # r
    local: Local = Local(epochs=1, lr=0.01, batch=10, momentum=0.5)  # training of the body
    head_epochs: Count = 10  # tau, before the body's; steps if these are counted, as in Algorithm 1

    promises = Promises(
        sends="its model without the classifier",
        headline="personalised",
        aggregates=EVERY_RULE,
        protects={"clients"},
        sums=True,
    )

    def quick(self, epochs: int) -> Self:
        return replace(super().quick(epochs), head_epochs=min(self.head_epochs, epochs))

    def server(self, problem: Problem) -> GlobalModel:
        return first_shared(problem, body(problem.first_model()))

    def client(self, site: Site) -> Own:
        """The head, drawn by the client."""
        model = site.model(fresh=True)
        return Own(state_of(model, keep=classifier(model).__contains__))

    def round(self, state: GlobalModel, net: Network, t: int) -> None:
        mean = net.mean(state.theta)
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=Body(Dense(state.theta))):
            mean.add(reply.theta.dense())
        state.theta = mean()

    def train(self, state: Own, message: Body, site: Site) -> Body:
        phi = message.theta.dense()
        model = site.model(state.theta | phi)
        let_learn(model, classifier(model))
        site.fit(model, self.local.lasting(self.head_epochs))
        let_learn(model, phi)
        site.fit(model, self.local)
        state.theta = state_of(model)
        return Body(Dense({name: state.theta[name] for name in phi}))

    def local_model(self, state: Own, site: Site) -> nn.Module:
        return site.model(state.theta)

    def observed(self, model: nn.Module) -> list[str]:
        return parameters_among(model, body(model))


def body(model: nn.Module) -> list[str]:
    """Names of all entries except the classifier's. Raises UserError if there are none."""
    own = classifier(model)
    names = [name for name in trained_entries(model) if name not in own]
    if not names:
        raise UserError("the model has one layer, which FedRep keeps with the clients: nothing is left to share")
    return names


def let_learn(model: nn.Module, names: Collection[str]) -> None:
    """Train only the named parameters; freeze the other trainable ones."""
    for name, p in trained_parameters(model).items():
        p.requires_grad_(name in names)
        p.grad = None  # clear old gradients, which would be clipped together with new ones
