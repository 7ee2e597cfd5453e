"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
Algorithm 2.

FedAvg with clients that stay near the server's model: client k minimises h_k(w; w_t) = F_k(w) + mu/2 ||w - w_t||^2,
approximately. A fraction `stragglers` of the clients, on slow systems, train for fewer epochs and count the same. The
server takes the mean of the returned models, weighted by the clients' numbers of samples.

Bytes per client and round, before lossless coding: 4 D down, 4 D up, where D counts the model's values (with
batch-norm buffers).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fewbytes.base.ranges import NotNegative, Share, UpToOne
from fewbytes.base.state import trained_entries
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import averaging
from fewbytes.methods.parts.averaging import GlobalModel, Model, Trained
from fewbytes.methods.parts.proximal import proximal
from fewbytes.wire import Dense


@dataclass(frozen=True)
class FedProx(Method):
    """Hyper-parameters of FedProx, with the paper's values for MNIST."""

    fraction: Share = 1.0
    local: Local = Local(epochs=20, lr=0.03, batch=10)  # E, eta, B
    mu: NotNegative = 1.0  # weight of a client's distance from the model it received
    stragglers: UpToOne = 0.0  # fraction of clients that train for only 1 to E epochs (or steps), drawn each round

    promises = Promises(sends="its whole model", aggregates=EVERY_RULE, protects={"clients", "samples"}, sums=True)

    def server(self, problem: Problem) -> GlobalModel:
        return averaging.first_shared(problem, trained_entries(problem.first_model()))

    def round(self, state: GlobalModel, net: Network, t: int) -> None:
        mean = net.mean(state.theta)
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=Model(Dense(state.theta))):
            mean.add(reply.theta.dense(), weight=reply.samples)
        state.theta = mean()

    def train(self, state: None, message: Model, site: Site) -> Trained:
        local = self.local
        if site.rng.random() < self.stragglers:
            local = local.lasting(int(site.rng.integers(1, local.length, endpoint=True)))
        near = proximal(self.mu, message.theta.dense(), site.device)
        return averaging.train_whole(message, site, local, extra=near)

    def global_model(self, state: GlobalModel, problem: Problem) -> nn.Module:
        return problem.first_model(state.theta)

    def observed(self, model: nn.Module) -> list[str]:
        return averaging.parameters_among(model, trained_entries(model))
