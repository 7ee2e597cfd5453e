"""FedCAMS: Wang, Lin, Chen, "Communication-Efficient Adaptive Federated Learning", ICML 2022, Algorithm 2, with scaled
sign compression and FedAMS (option 1: the maximum) on the server.

Every client adds the unsent rest of earlier rounds, e_i, to its change Delta_i. It sends the scaled sign of the sum, as
one vector x of d values, C(x) = (||x||_1 / d) sign(x), and keeps e_i <- x - C(x). The server uses the mean D of the
uploads as a gradient: m <- beta1 m + (1 - beta1) D; v <- beta2 v + (1 - beta2) D^2; v^ <- max(v^, v, epsilon);
theta <- theta + eta m / sqrt(v^). Batch-norm statistics are averaged as they are.

Bytes per client and round, before lossless coding: 4 D down; d/8 + 4 + 4 s up, where the model's D values are d
parameters and s batch-norm statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from fewbytes.base.ranges import EXACT, LEARNT, SENT, STATISTICS, BelowOne, Positive, Share
from fewbytes.base.state import State, zeros_for_sums
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import compressed
from fewbytes.methods.parts.averaging import Model
from fewbytes.methods.parts.compressed import Residual, ServerModel
from fewbytes.wire import Dense, Signs, payload


@payload
class Signed:
    """Client to server: C(Delta_i + e_i), and the batch-norm statistics."""

    change: Annotated[Signs, SENT, LEARNT]
    buffers: Annotated[Dense, SENT, STATISTICS, EXACT]


@dataclass
class Moments(ServerModel):
    """The server's state."""

    m: State
    v: State
    highest: State  # v^


@dataclass(frozen=True)
class FedCAMS(Method):
    """Hyper-parameters of FedCAMS; the authors' code's values."""

    fraction: Share = 1.0
    local: Local = Local(epochs=3, lr=0.01, batch=20)
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.99
    epsilon: Positive = 1e-3  # minimum of v^
    server_lr: Positive = 1.0  # eta

    promises = Promises(sends="the signs of its change, one bit each", aggregates=EVERY_RULE, protects={"clients"})

    def server(self, problem: Problem) -> Moments:
        first = compressed.first_server_model(problem)
        zeros = [{name: zeros_for_sums(value) for name, value in first.theta.items()} for _ in range(3)]
        return Moments(first.theta, first.buffers, *zeros)

    def client(self, site: Site) -> Residual:
        return Residual({})

    def round(self, state: Moments, net: Network, t: int) -> None:
        replies = net.call(self.train, to=net.sample(self.fraction), send=compressed.message(state))
        self.move(state, compressed.take_means(state, replies, net))

    def move(self, state: Moments, change: State) -> None:
        """The server's step after a mean change."""
        theta = dict(state.theta)
        for name, d in change.items():
            m, v, highest = self.moments(state.m[name], state.v[name], state.highest[name], d)
            state.m[name], state.v[name], state.highest[name] = m, v, highest
            theta[name] = (theta[name] + self.server_lr * m / highest.sqrt()).to(theta[name].dtype)
        state.theta = theta

    def moments(self, m: Tensor, v: Tensor, highest: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """m, v and v^ after a mean change d."""
        m = self.beta1 * m + (1 - self.beta1) * d
        v = self.beta2 * v + (1 - self.beta2) * d.square()
        return m, v, torch.maximum(highest, v).clamp(min=self.epsilon)

    def train(self, state: Residual, message: Model, site: Site) -> Signed:
        change, buffers = compressed.trained_change(message, site, self.local)
        x = state.added(change)
        sent = Signs.of(x)
        state.keep(x, sent.dense())
        return Signed(sent, buffers)

    def global_model(self, state: Moments, problem: Problem) -> nn.Module:
        return compressed.whole(state, problem)
