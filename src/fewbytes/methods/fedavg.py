"""FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, Algorithm 1.

Each round the server sends its model to randomly sampled clients. Each trains the model on its own data for a few
local epochs. The server takes the mean of the returned models, weighted by the clients' numbers of samples:
w_{t+1} = sum_k (n_k / n) w_{t+1}^k.

With `server_lr`, `server_momentum` or `nesterov`, it is FedAvgM: Hsu, Qi, Brown, "Measuring the Effects of
Non-Identical Data Distribution for Federated Visual Classification", 2019, arXiv 1909.06335. The mean change is then a
gradient of SGD with momentum: (1) D = sum_k (n_k / n) w_{t+1}^k - w_t; (2) v <- beta v + D; (3) w_{t+1} = w_t + eta v
or, by Nesterov, w_t + eta (D + beta v). Batch-norm statistics are averaged as they are.

Bytes per client and round, before lossless coding: 4 D down, 4 D up, where D counts the model's values (with
batch-norm buffers when they are averaged too).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import nn

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import BelowOne, Positive, Share
from fewbytes.base.state import State, own_entries, state_of, trained_entries, trained_parameters
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
    MovingModel,
    Own,
    Trained,
    first_shared,
    learnt,
    mean_change,
    outer_step,
    own_model,
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
    server_lr: Positive = 1.0  # eta of the server's step
    server_momentum: BelowOne = 0.0  # beta of the server's step
    nesterov: bool = False  # the server's momentum is Nesterov's

    promises = Promises(
        sends="its whole model", aggregates=EVERY_RULE, protects={"clients", "samples"}, sums=True, keeps_own=True
    )

    def __post_init__(self) -> None:
        if self.nesterov and not self.server_momentum:
            raise UserError("nesterov is a kind of momentum: set server_momentum above 0, or leave nesterov out")

    def __repr__(self) -> str:
        """Names the server's step only if it is not the mean: runs from before there was one can be resumed."""
        steps = {"server_lr": 1.0, "server_momentum": 0.0, "nesterov": False}
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        shown = [f"{name}={value!r}" for name, value in values.items() if name not in steps or value != steps[name]]
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def server(self, problem: Problem) -> GlobalModel:
        first = first_shared(problem, self.shared(problem.first_model()))
        return MovingModel(first.theta, {}) if self.server_momentum else first

    def state_class(self, half: Literal["server", "client"]) -> type[Any] | None:
        """The server keeps velocities only if there is momentum."""
        return MovingModel if half == "server" and self.server_momentum else super().state_class(half)

    def shared(self, model: nn.Module) -> list[str]:
        """Names of the model's entries that are sent."""
        own = own_entries(model)
        sent = trained_entries(model) if self.buffers == "averaged" else trained_parameters(model)
        return [name for name in sent if name not in own]

    def client(self, site: Site) -> Own | None:
        return Own({}) if self.buffers == "local" or site.problem.own else None

    def round(self, state: GlobalModel, net: Network, t: int) -> None:
        mean = net.mean(state.theta)
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=Model(Dense(state.theta))):
            mean.add(reply.theta.dense(), weight=reply.samples)
        state.theta = self.stepped(state, mean(), net.problem)

    def stepped(self, state: GlobalModel, mean: State, problem: Problem) -> State:
        """The next model, from the mean: the mean itself or, by the server's step, (1) to (3). Updates velocities."""
        if self.server_lr == 1 and not self.server_momentum:
            return mean
        change = mean_change(state.theta, mean, learnt(problem, mean))
        velocity = state.velocity if isinstance(state, MovingModel) else {}
        moved, v = outer_step(state.theta, change, velocity, self.server_lr, self.server_momentum, self.nesterov)
        if isinstance(state, MovingModel):
            state.velocity = v
        return mean | moved

    def train(self, state: Own | None, message: Model, site: Site) -> Trained:
        received = message.theta.dense()
        model = site.model((state.theta if state else {}) | received)
        if self.received:
            site.score("combined", model)
        site.fit(model, self.local)
        site.score("personalised", model)
        if state is not None:
            state.theta = state_of(model)
        return Trained(Dense(state_of(model, keep=received.__contains__)), len(site.train))

    def global_model(self, state: GlobalModel, problem: Problem) -> nn.Module | None:
        return whole_model(state, problem)

    def has_local_models(self, own: bool) -> bool:
        return own

    def local_model(self, state: Own | None, site: Site) -> nn.Module | None:
        return own_model(state, site) if state is not None and site.problem.own else None

    def observed(self, model: nn.Module) -> list[str]:
        return parameters_among(model, self.shared(model))
