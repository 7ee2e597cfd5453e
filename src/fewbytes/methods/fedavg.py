"""FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, Algorithm 1.

Each round the server sends its model to randomly sampled clients. Each trains the model on its own data for a few
local epochs. The server takes the mean of the returned models, weighted by the clients' numbers of samples:
w_{t+1} = sum_k (n_k / n) w_{t+1}^k.

Bytes per client and round, before lossless coding: 4 D down, 4 D up, where D counts the model's values (with
batch-norm buffers when they are averaged too).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from fewbytes.base.ranges import Share
from fewbytes.base.state import state_of, trained_entries, trained_parameters
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.averaging import (
    GlobalModel,
    Model,
    Own,
    Trained,
    first_shared,
    parameters_among,
    whole_model,
)
from fewbytes.wire.dense import Dense


@dataclass(frozen=True)
class FedAvg(Method):
    """Hyper-parameters of FedAvg."""

    fraction: Share = 1.0  # C, the fraction of clients sampled each round
    local: Local = Local(epochs=1, lr=0.01, batch=10)  # E, eta, B
    buffers: Literal["averaged", "local"] = "averaged"  # batch-norm statistics; local: never sent (FedPURIN's tables)
    received: bool = False  # also score the received model on clients

    promises = Promises(sends="its whole model", aggregates=EVERY_RULE, protects={"clients", "samples"}, sums=True)

    def server(self, problem: Problem) -> GlobalModel:
        return first_shared(problem, self.shared(problem.first_model()))

    def shared(self, model: nn.Module) -> list[str]:
        """Names of the model's entries that are sent."""
        return list(trained_entries(model) if self.buffers == "averaged" else trained_parameters(model))

    def client(self, site: Site) -> Own | None:
        return Own({}) if self.buffers == "local" else None

    def round(self, state: GlobalModel, net: Network, t: int) -> None:
        mean = net.mean(state.theta)
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=Model(Dense(state.theta))):
            mean.add(reply.theta.dense(), weight=reply.samples)
        state.theta = mean()

    def train(self, state: Own | None, message: Model, site: Site) -> Trained:
        received = message.theta.dense()
        model = site.model(received | (state.theta if state else {}))
        if self.received:
            site.score("combined", model)
        site.fit(model, self.local)
        site.score("personalised", model)
        if state is not None:
            state.theta = state_of(model, keep=lambda name: name not in received)
        return Trained(Dense(state_of(model, keep=received.__contains__)), len(site.train))

    def global_model(self, state: GlobalModel, problem: Problem) -> nn.Module | None:
        return whole_model(state, problem)

    def observed(self, model: nn.Module) -> list[str]:
        return parameters_among(model, self.shared(model))
