"""LG-FedAvg: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated
Learning with Local and Global Representations", NeurIPS 2019 workshop on Federated Learning.

Every client keeps a model of its own; features may come about in any way, as long as they are equally many. Clients
train their whole model and upload its classifier; the server takes the mean of the classifiers, weighted by the
clients' numbers of samples; clients overwrite theirs with it and train on.

The mean of round t travels with the request of round t + 1, after the last round by itself, and is scored as it
arrives (`combined`).

Bytes per client and round, before lossless coding: 4 (K' + 1) C up, for K' features and C classes, and as many down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fewbytes.base.state import Mean, State, state_of
from fewbytes.core.network import Network
from fewbytes.core.problem import Task
from fewbytes.core.site import Site
from fewbytes.methods.parts.heterogeneous import Head, Heterogeneous, Own, TrainedHead, overwrite_head, shared_head
from fewbytes.models.blocks import head_of
from fewbytes.wire import Dense


@dataclass
class Global:
    """The server's state."""

    head: State  # empty before the first mean


@dataclass(frozen=True)
class LG_FedAvg(Heterogeneous):
    """LG-FedAvg has no hyper-parameters beside those of local training."""

    headline: ClassVar[str] = "combined"

    def server(self, task: Task) -> Global:
        shared_head(task)
        return Global({})

    def client(self, site: Site) -> Own:
        return Own(state_of(site.model(fresh=True)))

    def round(self, state: Global, net: Network, t: int) -> None:
        mean = Mean()
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=self.download(state)):
            mean.add(reply.theta.dense(), weight=reply.samples)
        state.head = mean()

    def finish(self, state: Global, net: Network) -> None:
        net.tell(self.receive, to=net.clients, send=self.download(state))

    def download(self, state: Global) -> Head | None:
        return Head(Dense(state.head)) if state.head else None

    def train(self, state: Own, message: Head | None, site: Site) -> TrainedHead:
        self.receive(state, message, site)
        model = site.model(state.theta)
        self.train_on(site, model)
        state.theta = state_of(model)
        return TrainedHead(Dense(state_of(head_of(model))), len(site.train))

    def receive(self, state: Own, message: Head | None, site: Site) -> None:
        if message is not None:
            overwrite_head(state, message.theta.dense(), site)
