"""FML: Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu, "Federated Mutual Learning", 2020, arXiv
2006.16765, Algorithm 1.

Every client keeps its own model, of any architecture, and a copy of one small auxiliary model that all clients share.
On each batch the two models learn the labels and from each other (deep mutual learning): L_a = alpha CE(a) +
(1 - alpha) KL(p_b || p_a) for its own model a, L_b = beta CE(b) + (1 - beta) KL(p_a || p_b) for the auxiliary b. Only
b is uploaded; the server takes the mean. Predictions come from a.

The auxiliary has the architecture of client 0, and its first weights are drawn from the seed at both ends; the mean of
round t is sent with the request of round t + 1. Its batch-norm statistics are neither sent nor kept, as it runs only in
training mode, which does not read them.

Bytes per client and round, before lossless coding: 4 P up and 4 P down, where P counts the auxiliary's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.ranges import LEARNT, Share, UpToOne
from fewbytes.base.state import State, state_of
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
from fewbytes.methods.parts.distillation import divergence
from fewbytes.methods.parts.heterogeneous import STORED, AuxiliaryMean, Own, number_of_classes, own_draw
from fewbytes.wire import Dense, payload

Kl = Literal["mean", "batchmean"]


@payload
class Auxiliary:
    """In either direction: the auxiliary model's parameters."""

    theta: Annotated[Dense, LEARNT]


@dataclass(frozen=True)
class FML(Method):
    """Hyper-parameters of FML; those of FedKTL's comparison."""

    fraction: Share = 1.0  # rho
    local: Local = replace(STORED, clip=10.0)  # clips the gradient of each model
    alpha: UpToOne = 0.5  # weight of the labels in L_a
    beta: UpToOne = 0.5  # weight of the labels in L_b
    kl: Kl = "mean"  # mean over samples and classes, as in the authors' code; batchmean: over samples
    detach: bool = False  # no gradient of one model's loss through the other model

    promises = Promises(
        sends="a small shared model",
        headline="personalised",
        models_differ=True,
        brings_loss=True,
        aggregates=EVERY_RULE,
        sums=True,
    )
    needs: ClassVar[type[Objective]] = Classification

    def server(self, problem: Problem) -> AuxiliaryMean:
        number_of_classes(problem)
        return AuxiliaryMean({})

    def client(self, site: Site) -> Own:
        return own_draw(site)

    def round(self, state: AuxiliaryMean, net: Network, t: int) -> None:
        mean, send = net.mean(state.auxiliary), Auxiliary(Dense(state.auxiliary)) if state.auxiliary else None
        check = like(theta=parameters_of(net.problem.first_model()))
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=send, check=check):
            mean.add(reply.theta.dense())
        state.auxiliary = mean()

    def train(self, state: Own, message: Auxiliary | None, site: Site) -> Auxiliary:
        own = site.model(state.theta)
        auxiliary = site.model(None if message is None else message.theta.dense(), of=0)
        site.fit(Both(own, auxiliary), self.local, loss=self.loss)
        state.theta = state_of(own)
        return Auxiliary(Dense(parameters_of(auxiliary)))

    def loss(self, logits: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        """L_a + L_b."""
        a, b = logits
        as_seen_by_b, as_seen_by_a = (a.detach(), b.detach()) if self.detach else (a, b)
        loss_a = self.alpha * F.cross_entropy(a, labels) + (1 - self.alpha) * mean_divergence(as_seen_by_a, a, self.kl)
        loss_b = self.beta * F.cross_entropy(b, labels) + (1 - self.beta) * mean_divergence(as_seen_by_b, b, self.kl)
        return loss_a + loss_b

    def local_model(self, state: Own, site: Site) -> nn.Module:
        return site.model(state.theta)


class Both(nn.Module):
    """Two models in parallel; returns both outputs."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b
        self.apart = a, b

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def mean_divergence(teacher: Tensor, student: Tensor, kl: Kl) -> Tensor:
    """KL(p_teacher || p_student) of logits (n, C): the mean over samples, with `mean` also over classes."""
    value = divergence(teacher, student).mean()
    return value / student.shape[1] if kl == "mean" else value


def parameters_of(model: nn.Module) -> State:
    """A copy of the model's parameters, without its buffers."""
    learnt = {name for name, _ in model.named_parameters()}
    return state_of(model, keep=learnt.__contains__)
