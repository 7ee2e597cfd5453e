"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv 1912.00818,
2019; as FedPURIN's evaluation runs it.

The model is a base and a personalisation layer: here the classifier, its last layer. Clients train both; only the base
is sent and averaged as in FedAvg, w_B <- sum_k (n_k / n) w_B^k, while every classifier stays with its client, from
weights the client draws itself. Batch normalisation's parameters belong to the base; its statistics stay, too.

Bytes per client and round, before lossless coding: 4 D_B down, 4 D_B up, where D_B counts the base's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from fewbytes.base.errors import UserError
from fewbytes.base.state import state_of
from fewbytes.core.ranges import BelowOne, Count, Positive
from fewbytes.core.site import Site
from fewbytes.methods.fedavg import FedAvg, Model, Own, Trained
from fewbytes.models.layers import layers_of
from fewbytes.wire import Dense


@dataclass(frozen=True)
class FedPer(FedAvg):
    """Hyper-parameters of FedAvg, with the values of FedPURIN's evaluation."""

    epochs: Count = 5
    lr: Positive = 0.1
    batch: Count = 100
    momentum: BelowOne = 0.9
    buffers: Literal["averaged", "local"] = "local"

    headline: ClassVar[str] = "personalised"

    def shared(self, model: nn.Module) -> list[str]:
        own = classifier(model)
        base = [name for name in super().shared(model) if name not in own]
        if not base:
            raise UserError("the model has one layer, which FedPer keeps with the clients: nothing is left to share")
        return base

    def client(self, site: Site) -> Own:
        """What the client draws itself: the classifier."""
        model = site.model(fresh=True)
        return Own(state_of(model, keep=classifier(model).__contains__))

    def train(self, state: Own, message: Model, site: Site) -> Trained:  # type: ignore[override]
        base = message.theta.dense()
        model = site.model(state.theta | base)
        self.train_on(site, model)
        state.theta = state_of(model)
        return Trained(Dense({name: state.theta[name] for name in base}), len(site.train))

    def local_model(self, state: Own, site: Site) -> nn.Module:
        return site.model(state.theta)


def classifier(model: nn.Module) -> list[str]:
    """Names of the parameters of the model's last layer, linear or convolutional."""
    return list(layers_of(model).values())[-1]
