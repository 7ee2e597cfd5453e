"""FedGH: Yi, Wang, Liu, Shi, Yu, "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM
Multimedia 2023, Algorithm 1.

Every client keeps its own model. Clients train their whole model and upload the mean features of each class they have;
the server trains one classifier on these, which it keeps over rounds, and clients overwrite theirs with it. All start
with the same classifier, client 0's, drawn from the seed.

The classifier of round t is sent with the request of round t + 1, or after the last round in its own message. It is
scored on arrival (`combined`).

Bytes per client and round, before lossless coding: 4 K' |C_i| up, for K' features and the |C_i| classes it holds;
4 (K' + 1) C down, for C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewbytes.base.ranges import Count, Positive, Several, Share
from fewbytes.base.state import State, load_state, state_of
from fewbytes.base.streams import seeded
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.objective import Objective
from fewbytes.core.objectives import Classification
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.site import Site
from fewbytes.core.training import Local, fit
from fewbytes.methods.parts.heterogeneous import (
    STORED,
    ClassVectors,
    Head,
    Own,
    begin_training,
    class_means,
    end_training,
    gathered,
    one_each,
    receive_head,
    shared_head,
)
from fewbytes.models.blocks import features_of, head_of, linear_of
from fewbytes.wire import Dense


@dataclass
class GlobalHead:
    """The server's state."""

    head: State


@dataclass(frozen=True)
class FedGH(Method):
    """Hyper-parameters of FedGH; those of FedKTL's comparison."""

    fraction: Share = 1.0  # rho
    local: Local = STORED
    server_epochs: Count = 1
    server_lr: Positive = 0.01
    server_batch: Several = 10  # in class means

    promises = Promises(
        sends="the mean features of its classes", headline="combined", models_differ=True, float32_only=True
    )
    needs: ClassVar[type[Objective]] = Classification

    def server(self, problem: Problem) -> GlobalHead:
        return GlobalHead(state_of(shared_head(problem)))

    def client(self, site: Site) -> Own:
        model = site.model(fresh=True)
        load_state(head_of(model), state_of(head_of(site.problem.first_model())))
        return Own(state_of(model))

    def round(self, state: GlobalHead, net: Network, t: int) -> None:
        head = linear_of(state.head)
        check = one_each(head.out_features, head.in_features)
        means, labels = gathered(net.call(self.train, to=net.sample(self.fraction), check=check))
        with seeded(net.problem.seed, "server", t):
            fit(head, means, labels, Local(self.server_epochs, self.server_lr, self.server_batch, last="kept"))
        state.head = state_of(head)
        net.tell(self.receive, send=Head(Dense(state.head)), when="next")

    def train(self, state: Own, message: None, site: Site) -> ClassVectors:
        model = begin_training(state, site)
        site.fit(model, self.local)
        end_training(state, model)
        return class_means(*site.outputs(features_of(model)))

    def receive(self, state: Own, message: Head, site: Site) -> None:
        receive_head(state, message.theta.dense(), site)

    def local_model(self, state: Own, site: Site) -> nn.Module:
        return site.model(state.theta)
