"""FedProto: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous
Clients", AAAI 2022, Algorithm 1.

Every client keeps its own model; feature extractors may differ, but features have one size. During training a client
averages the features of its samples per class and uploads these means, the prototypes; the server averages them over
the clients that have the class. In the next round clients learn their labels and stay near the global prototypes:
L = CE(h(f(x)), y) + lambda mean (f(x) - P_y)^2. Classes without a global prototype so far have no such term.
A sample is assigned to the class with the nearest global prototype.

The prototypes of round t are sent with the request of round t + 1, or after the last round in their own message. They
are scored on arrival (`combined`). A class that no client sent in a round keeps its prototype.

Bytes per client and round, before lossless coding: 4 K' |C_i| up, for K' features and the |C_i| classes it trained on;
4 K' for each class known to the server down, 4 K' C at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fewbytes.base.ranges import NotNegative, Share
from fewbytes.base.state import State, state_of
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
    WithFeatures,
    class_distance,
    feature_size,
    gathered,
    number_of_classes,
    one_each,
    with_means,
)
from fewbytes.models.blocks import features_of, head_sizes
from fewbytes.models.prototypes import PrototypeNetwork


@dataclass
class GlobalPrototypes:
    """The server's state."""

    classes: int  # C
    features: int  # K'
    prototypes: ClassVectors | None = None


@dataclass
class Own:
    """A client's state."""

    theta: State  # its model
    prototypes: ClassVectors | None = None  # the global ones of its last training
    received: ClassVectors | None = None  # those of its next


@dataclass(frozen=True)
class FedProto(Method):
    """Hyper-parameters of FedProto; those of FedKTL's comparison."""

    fraction: Share = 1.0  # rho
    local: Local = STORED
    lambda_proto: NotNegative = 10.0  # weight of the distance to the global prototypes

    promises = Promises(
        sends="the mean features of its classes",
        headline="combined",
        models_differ=True,
        float32_only=True,
        brings_loss=True,
    )
    needs: ClassVar[type[Objective]] = Classification

    def server(self, problem: Problem) -> GlobalPrototypes:
        features = feature_size(problem)  # first, as it refuses models without features
        return GlobalPrototypes(number_of_classes(problem), features)

    def client(self, site: Site) -> Own:
        return Own(state_of(site.model(fresh=True)))

    def round(self, state: GlobalPrototypes, net: Network, t: int) -> None:
        check = one_each(state.classes, state.features)
        replies = net.call(self.train, to=net.sample(self.fraction), check=check)
        state.prototypes = with_means(state.prototypes, *gathered(replies))
        net.tell(self.receive, send=state.prototypes, when="next")

    def train(self, state: Own, message: None, site: Site) -> ClassVectors:
        state.prototypes = near = state.received or state.prototypes
        model, sums = site.model(state.theta), ClassSums()

        def loss(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
            features, logits = outputs
            sums.add(features, labels)
            return F.cross_entropy(logits, labels) + self.lambda_proto * class_distance(features, labels, near)

        site.fit(WithFeatures(model), self.local, loss=loss)
        state.theta = state_of(model)
        return sums.means()

    def receive(self, state: Own, message: ClassVectors, site: Site) -> None:
        state.received = message
        site.score("combined", self.network(state, message, site))

    def network(self, state: Own, prototypes: ClassVectors, site: Site) -> PrototypeNetwork:
        """The client's features with the prototypes that classify them."""
        model = site.model(state.theta)
        network = PrototypeNetwork(features_of(model), prototypes.rows, prototypes.classes, head_sizes(model)[1])
        network.recipe["client"] = site.me
        return network.to(site.device)

    def local_model(self, state: Own, site: Site) -> PrototypeNetwork | None:
        prototypes = state.prototypes or state.received
        return None if prototypes is None else self.network(state, prototypes, site)
