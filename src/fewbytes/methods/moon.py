"""MOON: Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1.

FedAvg in which clients also keep their features of a sample, z = R(w; x), near those that the server's model has, and
away from those that their own last model had. (3) l_con = -log(exp(sim(z, z_glob) / tau) / (exp(sim(z, z_glob) / tau)
+ exp(sim(z, z_prev) / tau))), with sim the cosine, and the two other models frozen. A client minimises (4)
l = CE + mu l_con; the server averages the clients' models by their numbers of samples. Before a client's first training
its last model is the first one: in round 1 the term is constant.

Bytes per client and round, before lossless coding: 4 D down, 4 D up, where D counts the model's values (with
batch-norm buffers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import NotNegative, Positive, Share
from fewbytes.base.state import state_of, trained_entries
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.objective import Objective
from fewbytes.core.objectives import Classification
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.averaging import GlobalModel, Model, Own, Trained, first_shared, parameters_among
from fewbytes.methods.parts.distillation import classifier_inputs
from fewbytes.wire import Dense


@dataclass(frozen=True)
class MOON(Method):
    """Hyper-parameters of MOON; the paper's."""

    fraction: Share = 1.0
    local: Local = Local(epochs=10, lr=0.01, batch=64, momentum=0.9, weight_decay=1e-5)
    mu: NotNegative = 1.0  # weight of the contrast
    temperature: Positive = 0.5  # tau, by which similarities are divided

    promises = Promises(
        sends="its whole model",
        brings_loss=True,
        aggregates=EVERY_RULE,
        protects={"clients"},
        sums=True,
    )
    needs: ClassVar[type[Objective]] = Classification

    def server(self, problem: Problem) -> GlobalModel:
        model = problem.first_model()
        if not any(isinstance(module, nn.Linear) for module in model.modules()):
            raise UserError(f"a {type(model).__name__} has no Linear, whose input MOON contrasts: use another model")
        return first_shared(problem, trained_entries(model))

    def client(self, site: Site) -> Own:
        """No last model yet."""
        return Own({})

    def round(self, state: GlobalModel, net: Network, t: int) -> None:
        mean = net.mean(state.theta)
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=Model(Dense(state.theta))):
            mean.add(reply.theta.dense(), weight=reply.samples)
        state.theta = mean()

    def train(self, state: Own, message: Model, site: Site) -> Trained:
        w = message.theta.dense()
        model, received, last = site.model(w), site.model(w), site.model(state.theta)
        with classifier_inputs(nn.ModuleList([model, received, last])) as features:
            site.fit(Contrasted(model, received, last, features), self.local, loss=self.loss)
        site.score("personalised", model)
        state.theta = state_of(model)
        return Trained(Dense(state.theta), len(site.train))

    def loss(self, outputs: tuple[Tensor, Tensor, Tensor, Tensor], labels: Tensor) -> Tensor:
        """(4), of the outputs of `Contrasted`."""
        logits, z, near, far = outputs
        return F.cross_entropy(logits, labels) + self.mu * contrast(z, near, far, self.temperature)

    def global_model(self, state: GlobalModel, problem: Problem) -> nn.Module:
        return problem.first_model(state.theta)

    def observed(self, model: nn.Module) -> list[str]:
        return parameters_among(model, trained_entries(model))


class Contrasted(nn.Module):
    """A model in training, the received one and the client's last one; returns logits (n, C) and all three's features
    (n, K'), which each forward pass appends to `features`."""

    def __init__(self, model: nn.Module, received: nn.Module, last: nn.Module, features: list[Tensor]) -> None:
        super().__init__()
        self.model, self.features = model, features
        self.received, self.last = received.requires_grad_(False), last.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self.features.clear()
        logits = self.model(x)
        for other in (self.received, self.last):
            other.eval()(x)
        z, near, far = (values.flatten(1).float() for values in self.features)
        return logits, z, near, far


def contrast(z: Tensor, near: Tensor, far: Tensor, temperature: float) -> Tensor:
    """(3), the mean over the samples of a batch: how little features z (n, K') are like `near` and unlike `far`."""
    similarities = torch.stack([F.cosine_similarity(z, other, dim=1) for other in (near, far)], 1)
    return -F.log_softmax(similarities / temperature, 1)[:, 0].mean()
