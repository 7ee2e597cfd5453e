"""LG-FedAvg: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated
Learning with Local and Global Representations", NeurIPS 2019 workshop on Federated Learning.

Every client keeps its own model; feature extractors may differ, but features have one size. Clients train their whole
model and upload its classifier; the server takes the mean of the classifiers, weighted by the clients' numbers of
samples; clients overwrite theirs with it and continue training.

The mean of round t is sent with the request of round t + 1, or after the last round in its own message. It is scored on
arrival (`combined`).

Bytes per client and round, before lossless coding: 4 (K' + 1) C up, for K' features and C classes, and the same down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewbytes.base.ranges import Share
from fewbytes.base.state import state_of
from fewbytes.core.admission import like
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.objective import Objective
from fewbytes.core.objectives import Classification
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.averaging import parameters_among
from fewbytes.methods.parts.heterogeneous import (
    STORED,
    Head,
    Own,
    TrainedHead,
    begin_training,
    end_training,
    own_draw,
    receive_head,
    shared_head,
)
from fewbytes.models.blocks import head_of
from fewbytes.models.layers import classifier
from fewbytes.wire import Dense


@dataclass(frozen=True)
class LG_FedAvg(Method):
    """LG-FedAvg has no hyper-parameters beside those of local training."""

    fraction: Share = 1.0  # rho
    local: Local = STORED
    promises = Promises(
        sends="its classifier", headline="combined", models_differ=True, aggregates=EVERY_RULE, sums=True
    )
    needs: ClassVar[type[Objective]] = Classification

    def server(self, problem: Problem) -> None:
        shared_head(problem)

    def client(self, site: Site) -> Own:
        return own_draw(site)

    def round(self, state: None, net: Network, t: int) -> None:
        mean, check = net.mean(), like(theta=state_of(shared_head(net.problem)))
        for _, reply in net.call(self.train, to=net.sample(self.fraction), check=check):
            mean.add(reply.theta.dense(), weight=reply.samples)
        net.tell(self.receive, send=Head(Dense(mean())), when="next")

    def train(self, state: Own, message: None, site: Site) -> TrainedHead:
        model = begin_training(state, site)
        site.fit(model, self.local)
        end_training(state, model)
        return TrainedHead(Dense(state_of(head_of(model))), len(site.train))

    def receive(self, state: Own, message: Head, site: Site) -> None:
        receive_head(state, message.theta.dense(), site)

    def local_model(self, state: Own, site: Site) -> nn.Module:
        return site.model(state.theta)

    def observed(self, model: nn.Module) -> list[str]:
        return parameters_among(model, classifier(model))
