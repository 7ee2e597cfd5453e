"""FedDistill: Jeong, Oh, Kim, Park, Bennis, Kim, "Communication-Efficient On-Device Machine Learning: Federated
Distillation and Augmentation under Non-IID Private Data", NeurIPS 2018 workshop MLPCD; without the augmentation.

Every client keeps its own model, of any architecture. During training it averages the logits of its samples per class
and uploads these means; the server averages them over the clients that have the class. In the next round clients learn
both their labels and the mean logits of the sample's class: L = CE(z, y) + gamma mean (z - zbar_y)^2. Classes without
mean logits so far have no such term.

The logits of round t are sent with the request of round t + 1. A class that no client sent in a round keeps its logits.

Bytes per client and round, before lossless coding: 4 C |C_i| up, for the |C_i| classes of C it trained on; 4 C for
each class known to the server down, 4 C^2 at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.ranges import NotNegative, Share
from fewbytes.base.state import state_of
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.objective import Objective
from fewbytes.core.objectives import Classification
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.heterogeneous import (
    STORED,
    ClassSums,
    ClassVectors,
    Own,
    class_distance,
    gathered,
    number_of_classes,
    one_each,
    own_draw,
    with_means,
)


@dataclass
class MeanLogits:
    """The server's state."""

    classes: int  # C
    logits: ClassVectors | None = None  # zbar


@dataclass(frozen=True)
class FedDistill(Method):
    """Hyper-parameters of FedDistill; those of FedKTL's comparison."""

    fraction: Share = 1.0  # rho
    local: Local = STORED
    gamma: NotNegative = 1.0  # weight of the distance to the mean logits

    promises = Promises(
        sends="the mean logits of its classes", headline="personalised", models_differ=True, brings_loss=True
    )
    needs: ClassVar[type[Objective]] = Classification

    def server(self, problem: Problem) -> MeanLogits:
        return MeanLogits(number_of_classes(problem))

    def client(self, site: Site) -> Own:
        return own_draw(site)

    def round(self, state: MeanLogits, net: Network, t: int) -> None:
        check = one_each(state.classes, state.classes)
        replies = net.call(self.train, to=net.sample(self.fraction), send=state.logits, check=check)
        state.logits = with_means(state.logits, *gathered(replies))

    def train(self, state: Own, message: ClassVectors | None, site: Site) -> ClassVectors:
        model, sums = site.model(state.theta), ClassSums()

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            sums.add(logits, labels)
            return F.cross_entropy(logits, labels) + self.gamma * class_distance(logits, labels, message)

        site.fit(model, self.local, loss=loss)
        state.theta = state_of(model)
        return sums.means()

    def local_model(self, state: Own, site: Site) -> nn.Module:
        return site.model(state.theta)
