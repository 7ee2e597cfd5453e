"""A method of your own in thirty lines: FedProx (Li et al. 2020), FedAvg with clients kept near the server.

Client k minimises F_k(w) + mu/2 |w - w_t|^2 (Eq. 2). With mu = 0 it is FedAvg.
"""

from dataclasses import dataclass

import torch
from torch import nn

import fewbytes as fb
from fewbytes.base.ranges import NotNegative
from fewbytes.core.rules import EVERY_RULE
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.models import build_model


@fb.payload
class Model:  # server to client: w_t
    theta: fb.Dense


@fb.payload
class Trained:  # client to server: w_{t+1}^k and n_k
    theta: fb.Dense
    samples: int


@dataclass
class Global:  # the server's state
    theta: fb.State


@dataclass(frozen=True)
class FedProx(fb.Method):
    mu: NotNegative = 0.1  # a type says what values a hyper-parameter may have
    local: fb.Local = fb.Local(epochs=2, lr=0.1, batch=20)  # its terms are given by their names: FedProx(epochs=5)
    promises = fb.Promises(aggregates=EVERY_RULE)  # may take the place of net.mean, as "median"

    def server(self, problem: fb.Problem) -> Global:
        return Global(problem.first_state())

    def round(self, state: Global, net: fb.Network, t: int) -> None:
        mean = net.mean(state.theta)
        for _, reply in net.call(self.train, to=net.clients, send=Model(fb.Dense(state.theta))):
            mean.add(reply.theta.dense(), weight=reply.samples)
        state.theta = mean()

    def train(self, state: None, message: Model, site: fb.Site) -> Trained:
        start = message.theta.dense()
        model = site.model(start)

        def near(model: nn.Module) -> torch.Tensor:
            moved = [p - start[name] for name, p in model.named_parameters() if name in start]  # what is trained
            return self.mu / 2 * sum(change.square().sum() for change in moved)

        site.fit(model, self.local, extra=near)
        return Trained(fb.Dense(fb.state_of(model)), len(site.train))

    def global_model(self, state: Global, problem: fb.Problem) -> nn.Module:
        return problem.first_model(state.theta)


digits = load_dataset("digits")
data = federate(digits, Partition("dirichlet", clients=10, alpha=0.3), seed=0)
task = fb.Task.on(data, lambda: build_model("mlp", digits.train.shape, len(digits.classes)), seed=0)
for mu in (0.0, 0.1):
    result = fb.run(FedProx(mu=mu), task, rounds=10)
    moved = result.summary["uplink_bytes"] + result.summary["downlink_bytes"]
    print(f"mu={mu}: global {result.accuracy:.1%}, {moved / 1e6:.2f} MB up and down")
