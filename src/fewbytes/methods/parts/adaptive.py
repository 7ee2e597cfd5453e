"""The base of FedAdam and FedYogi: the server uses the clients' mean change of the model as a gradient."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fewbytes.base.ranges import BelowOne, Positive, Share
from fewbytes.base.state import State, trained_entries, zeros_for_sums
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import averaging
from fewbytes.methods.parts.averaging import GlobalModel, Model, Trained, first_shared, learnt_entries, mean_change
from fewbytes.wire import Dense


@dataclass
class Moments(GlobalModel):
    """The server's state."""

    m: State  # of the parameters
    v: State


@dataclass(frozen=True)
class Adaptive(Method):
    """Algorithm 2, except the second moment's line, in which its variants differ."""

    fraction: Share = 1.0
    local: Local = Local(epochs=1, lr=0.0316, batch=20)  # eta_l
    server_lr: Positive = 0.01  # eta
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.99
    tau: Positive = 1e-3

    promises = Promises(sends="its whole model", aggregates=EVERY_RULE, protects={"clients", "samples"}, sums=True)

    def server(self, problem: Problem) -> Moments:
        """The first weights, m = 0 and v = tau^2, the paper's minimum. Raises as `first_shared` does."""
        model = problem.first_model()
        theta = first_shared(problem, trained_entries(model)).theta
        m = {name: zeros_for_sums(theta[name]) for name in learnt_entries(model)}
        return Moments(theta, m, {name: torch.full_like(value, self.tau**2) for name, value in m.items()})

    def round(self, state: Moments, net: Network, t: int) -> None:
        mean = net.mean(state.theta)
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=Model(Dense(state.theta))):
            mean.add(reply.theta.dense(), weight=reply.samples)
        theta = dict(mean())  # batch-norm statistics become their mean
        for name, delta in mean_change(state.theta, theta, state.m).items():
            x = state.theta[name]
            state.m[name] = self.beta1 * state.m[name] + (1 - self.beta1) * delta
            state.v[name] = self.second_moment(state.v[name], delta)
            theta[name] = (x + self.server_lr * state.m[name] / (state.v[name].sqrt() + self.tau)).to(x.dtype)
        state.theta = theta

    @abstractmethod
    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """The new v, from the old v and the mean change `delta` of the model."""

    def train(self, state: None, message: Model, site: Site) -> Trained:
        return averaging.train_whole(message, site, self.local)

    def global_model(self, state: Moments, problem: Problem) -> nn.Module:
        return problem.first_model(state.theta)

    def observed(self, model: nn.Module) -> list[str]:
        return averaging.parameters_among(model, trained_entries(model))
