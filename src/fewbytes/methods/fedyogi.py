"""FedYogi: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization", ICLR
2021, Algorithm 2.

FedAdam with a second moment that grows no faster and shrinks more slowly. Clients train as in FedAvg; the server takes
the mean D of their changes of the model, weighted by their numbers of samples, as a gradient for Yogi: m <- beta1 m +
(1 - beta1) D; v <- v - (1 - beta2) D^2 sign(v - D^2); x <- x + eta m / (sqrt(v) + tau). Batch-norm statistics are
averaged as they are.

Bytes per client and round, before lossless coding: 4 D down, 4 D up, where D counts the model's values (with
batch-norm buffers).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fewbytes.base.ranges import BelowOne, Positive, Share
from fewbytes.base.state import trained_entries
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import adaptive, averaging
from fewbytes.methods.parts.adaptive import Moments
from fewbytes.methods.parts.averaging import Model, Trained
from fewbytes.wire import Dense


@dataclass(frozen=True)
class FedYogi(Method):
    """Hyper-parameters of FedYogi."""

    fraction: Share = 1.0
    local: Local = Local(epochs=1, lr=0.0316, batch=20)  # eta_l
    server_lr: Positive = 0.01  # eta
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.99
    tau: Positive = 1e-3

    promises = Promises(sends="its whole model", aggregates=EVERY_RULE, protects={"clients", "samples"}, sums=True)

    def server(self, problem: Problem) -> Moments:
        return adaptive.first_moments(problem, self.tau)

    def round(self, state: Moments, net: Network, t: int) -> None:
        mean = net.mean(state.theta)
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=Model(Dense(state.theta))):
            mean.add(reply.theta.dense(), weight=reply.samples)
        adaptive.move(state, mean(), self.second_moment, self.beta1, self.server_lr, self.tau)

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """v after a mean change."""
        square = delta.square()
        return v - (1 - self.beta2) * square * (v - square).sign()

    def train(self, state: None, message: Model, site: Site) -> Trained:
        return averaging.train_whole(message, site, self.local)

    def global_model(self, state: Moments, problem: Problem) -> nn.Module:
        return problem.first_model(state.theta)

    def observed(self, model: nn.Module) -> list[str]:
        return averaging.parameters_among(model, trained_entries(model))
