"""Ditto: Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
Algorithm 1.

Clients train the server's model w_t as in FedAvg; nothing else affects it. Each also keeps its own model v_k, which it
never sends, and trains it for s local epochs near the server's: v_k <- v_k - eta (grad F_k(v_k) + lambda
(v_k - w_t)).

Bytes per client and round, before lossless coding: 4 D down, 4 D up, where D counts the model's values (with
batch-norm buffers); v_k costs none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fewbytes.base.ranges import NotNegative, Share, Whole
from fewbytes.base.state import state_of, trained_entries
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import averaging
from fewbytes.methods.parts.averaging import GlobalModel, Model, Own, Trained
from fewbytes.methods.parts.proximal import proximal
from fewbytes.wire import Dense


@dataclass(frozen=True)
class Ditto(Method):
    """Hyper-parameters of Ditto; the authors' code's values for Fashion-MNIST."""

    fraction: Share = 1.0
    local: Local = Local(epochs=1, lr=0.05, batch=16)
    personal_epochs: Whole = 0  # s, or steps if these are counted; 0: as many as for the server's model
    lambda_near: NotNegative = 1.0  # lambda

    promises = Promises(
        sends="its whole model", headline="personalised", aggregates=EVERY_RULE, protects={"clients"}, sums=True
    )

    def server(self, problem: Problem) -> GlobalModel:
        return averaging.first_shared(problem, trained_entries(problem.first_model()))

    def client(self, site: Site) -> Own:
        """No v_k yet: it starts from the first received model."""
        return Own({})

    def round(self, state: GlobalModel, net: Network, t: int) -> None:
        mean = net.mean(state.theta)
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=Model(Dense(state.theta))):
            mean.add(reply.theta.dense(), weight=reply.samples)
        state.theta = mean()

    def train(self, state: Own, message: Model, site: Site) -> Trained:
        w = message.theta.dense()
        model, personal = site.model(w), site.model(state.theta or w)
        site.fit(model, self.local)
        own = self.local.lasting(self.personal_epochs or self.local.length)
        site.fit(personal, own, extra=proximal(self.lambda_near, w, site.device))
        state.theta = state_of(personal)
        return Trained(Dense(state_of(model)), len(site.train))

    def global_model(self, state: GlobalModel, problem: Problem) -> nn.Module:
        return problem.first_model(state.theta)

    def local_model(self, state: Own, site: Site) -> nn.Module | None:
        return averaging.own_model(state, site)

    def observed(self, model: nn.Module) -> list[str]:
        return averaging.parameters_among(model, trained_entries(model))
