"""pFedSD: Jin, Bai, Yao, Dai, Gu, Yu, Sun, "Personalized Edge Intelligence via Federated Self-Knowledge Distillation",
IEEE Transactions on Parallel and Distributed Systems 34(2), 2023; as FedPURIN's evaluation runs it.

FedAvg with self-distillation: a client keeps its last trained model v_k and, when it trains the server's model again,
also learns from v_k's softened outputs. The loss of a batch is CE(o, y) + lambda T^2 KL(softmax(o_v / T) ||
softmax(o / T)), with KL summed over classes and averaged over samples; v_k is frozen. In a client's first round there
is no v_k, and the loss is CE alone. Batch-norm statistics stay with the client.

Bytes per client and round, before lossless coding: 4 D down, 4 D up, where D counts the model's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.ranges import NotNegative, Positive, Share
from fewbytes.base.state import in_training, state_of, trained_entries, trained_parameters
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.objective import Objective
from fewbytes.core.objectives import Classification
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.averaging import (
    GlobalModel,
    Model,
    Own,
    Trained,
    first_shared,
    own_model,
    parameters_among,
    whole_model,
)
from fewbytes.methods.parts.distillation import distillation_loss
from fewbytes.wire import Dense


@dataclass(frozen=True)
class PFedSD(Method):
    """Hyper-parameters of pFedSD, with the values of FedPURIN's evaluation."""

    fraction: Share = 1.0
    local: Local = Local(epochs=5, lr=0.1, batch=100, momentum=0.9)
    buffers: Literal["averaged", "local"] = "local"  # batch-norm statistics
    lambda_kd: NotNegative = 0.5  # lambda, weight of the distillation
    temperature: Positive = 3.0  # T
    teacher: Literal["train", "eval"] = "train"  # batch-norm mode of v_k; train: as in the authors' code

    promises = Promises(
        sends="its whole model",
        headline="personalised",
        brings_loss=True,
        aggregates=EVERY_RULE,
        protects={"clients"},
        sums=True,
    )
    needs: ClassVar[type[Objective]] = Classification

    def server(self, problem: Problem) -> GlobalModel:
        return first_shared(problem, self.shared(problem.first_model()))

    def shared(self, model: nn.Module) -> list[str]:
        """Names of the model's entries that are sent."""
        return list(trained_entries(model) if self.buffers == "averaged" else trained_parameters(model))

    def client(self, site: Site) -> Own:
        """No v_k yet."""
        return Own({})

    def round(self, state: GlobalModel, net: Network, t: int) -> None:
        mean = net.mean(state.theta)
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=Model(Dense(state.theta))):
            mean.add(reply.theta.dense(), weight=reply.samples)
        state.theta = mean()

    def train(self, state: Own, message: Model, site: Site) -> Trained:
        shared = message.theta.dense()
        model = site.model(state.theta | shared)
        if state.theta:
            site.fit(Taught(model, site.model(state.theta), self.teacher), self.local, loss=self.loss)
        else:
            site.fit(model, self.local)
        state.theta = state_of(model)
        return Trained(Dense({name: state.theta[name] for name in shared}), len(site.train))

    def loss(self, logits: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        """CE + lambda T^2 KL, of the student's and the teacher's logits (n, C)."""
        student, teacher = logits
        return F.cross_entropy(student, labels) + self.lambda_kd * distillation_loss(teacher, student, self.temperature)

    def global_model(self, state: GlobalModel, problem: Problem) -> nn.Module | None:
        return whole_model(state, problem)

    def local_model(self, state: Own, site: Site) -> nn.Module | None:
        return own_model(state, site)

    def observed(self, model: nn.Module) -> list[str]:
        return parameters_among(model, self.shared(model))


class Taught(nn.Module):
    """A model and its frozen teacher; returns both outputs."""

    def __init__(self, student: nn.Module, teacher: nn.Module, mode: Literal["train", "eval"]) -> None:
        super().__init__()
        self.student, self.teacher, self.mode = student, teacher.requires_grad_(False), mode

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        teacher = in_training(self.teacher) if self.mode == "train" else self.teacher.eval()
        return self.student(x), teacher(x)
