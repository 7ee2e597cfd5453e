"""FedDyn: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic
Regularization", ICLR 2021, Algorithm 1.

Clients' losses have other optima than the federation's, so clients that train far drift apart. FedDyn changes each
client's loss every round, so that the clients' optima and the server's model agree once training converges. Client k
keeps g_k, the gradient of its loss at its last solution, and solves (1) theta_k = argmin L_k(theta) - <g_k, theta> +
alpha/2 ||theta - theta^(t-1)||^2; then (2) g_k <- g_k - alpha (theta_k - theta^(t-1)). The server, with m clients of
which P_t reply: (3) h <- h - alpha/m sum (theta_k - theta^(t-1)); (4) theta^t = mean theta_k - h / alpha, plain means.
Batch-norm statistics are averaged as they are.

Bytes per client and round, before lossless coding: 4 D down, 4 D up, where D counts the model's values (with
batch-norm buffers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from fewbytes.base.ranges import SENT, Positive, Share
from fewbytes.base.state import State, state_of, trained_entries, trained_parameters, zeros_for_sums
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.averaging import (
    GlobalModel,
    Model,
    first_shared,
    learnt_entries,
    mean_change,
    parameters_among,
)
from fewbytes.wire import Dense, payload


@payload
class Solution:
    """Client to server: theta_k."""

    theta: Annotated[Dense, SENT]


@dataclass
class CorrectedModel(GlobalModel):
    """The server's state."""

    h: State  # the mean of all g_k, of the parameters


@dataclass
class Gradient:
    """A client's state."""

    g: State  # g_k; empty, which means 0, before its first training


@dataclass(frozen=True)
class FedDyn(Method):
    """Hyper-parameters of FedDyn; the authors' code's values for CIFAR-10."""

    fraction: Share = 1.0
    local: Local = Local(epochs=5, lr=0.1, batch=50, weight_decay=1e-3, clip=10.0)
    alpha: Positive = 0.01  # weight of a client's distance from the model it received

    promises = Promises(sends="its whole model", aggregates=EVERY_RULE)

    def server(self, problem: Problem) -> CorrectedModel:
        model = problem.first_model()
        theta = first_shared(problem, trained_entries(model)).theta
        return CorrectedModel(theta, {name: zeros_for_sums(theta[name]) for name in learnt_entries(model)})

    def client(self, site: Site) -> Gradient:
        return Gradient({})

    def round(self, state: CorrectedModel, net: Network, t: int) -> None:
        mean, replies = net.mean(state.theta), 0
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=Model(Dense(state.theta))):
            mean.add(reply.theta.dense())
            replies += 1
        solutions, part = mean(), replies / len(net.clients)
        state.h = moved_against(state.h, mean_change(state.theta, solutions, state.h), self.alpha * part)  # (3)
        state.theta = solutions | corrected(solutions, state.h, self.alpha)  # (4)

    def train(self, state: Gradient, message: Model, site: Site) -> Solution:
        theta = message.theta.dense()
        model = site.model(theta)
        g = state.g or {name: zeros_for_sums(theta[name]) for name in trained_parameters(model)}
        site.fit(model, self.local, extra=dynamic(self.alpha, theta, g, site.device))  # (1)
        site.score("personalised", model)
        solution = state_of(model)
        state.g = moved_against(g, mean_change(theta, solution, g), self.alpha)  # (2)
        return Solution(Dense(solution))

    def join(self, state: CorrectedModel, net: Network, client: Id) -> None:
        """Keep h the mean of all g_k: a newcomer's is 0."""
        clients = len(net.clients)
        state.h = {name: value * ((clients - 1) / clients) for name, value in state.h.items()}

    def global_model(self, state: CorrectedModel, problem: Problem) -> nn.Module:
        return problem.first_model(state.theta)

    def observed(self, model: nn.Module) -> list[str]:
        return parameters_among(model, trained_entries(model))


def dynamic(alpha: float, near: State, g: State, device: str) -> Callable[[nn.Module], Tensor]:
    """For `site.fit(…, extra=…)`: -<g, theta> + alpha/2 ||theta - near||^2, over a model's trained parameters theta."""
    near, g = ({name: value.to(device) for name, value in state.items()} for state in (near, g))

    def term(model: nn.Module) -> Tensor:
        parts = [
            alpha / 2 * (p - near[name]).square().sum() - (g[name] * p).sum()
            for name, p in model.named_parameters()
            if p.requires_grad
        ]
        return torch.stack(parts).sum()

    return term


def moved_against(gradient: State, change: State, alpha: float) -> State:
    """gradient - alpha change: where a solution changed by `change` under the term of weight alpha, its gradient."""
    return {name: value - alpha * change[name] for name, value in gradient.items()}


def corrected(mean: State, h: State, alpha: float) -> State:
    """mean - h / alpha, of h's entries, in the mean's dtypes."""
    return {name: (mean[name] - value / alpha).to(mean[name].dtype) for name, value in h.items()}
