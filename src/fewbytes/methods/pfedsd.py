"""pFedSD: Jin, Bai, Yao, Dai, Gu, Yu, Sun, "Personalized Edge Intelligence via Federated Self-Knowledge Distillation",
IEEE Transactions on Parallel and Distributed Systems 34(2), 2023; as FedPURIN's evaluation runs it.

FedAvg, in which a client does not forget what it had become: it keeps the model v_k it trained last and, when it trains
the server's model again, also learns from v_k's softened outputs. The loss of a batch is CE(o, y) + lambda T^2
KL(softmax(o_v / T) || softmax(o / T)), KL summed over classes and averaged over samples; nothing is learnt by v_k. In a
client's first round there is no v_k, and the loss is CE alone. Batch-norm statistics stay with the client.

Bytes per client and round, before lossless coding: 4 D down, 4 D up, where D counts the model's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.state import in_training, state_of
from fewbytes.core.ranges import BelowOne, Count, NotNegative, Positive
from fewbytes.core.site import Site
from fewbytes.methods.fedavg import FedAvg, Model, Own, Trained
from fewbytes.methods.parts.distillation import distillation_loss
from fewbytes.wire import Dense


@dataclass(frozen=True)
class PFedSD(FedAvg):
    """Hyper-parameters of pFedSD, with the values of FedPURIN's evaluation."""

    epochs: Count = 5
    lr: Positive = 0.1
    batch: Count = 100
    momentum: BelowOne = 0.9
    buffers: Literal["averaged", "local"] = "local"
    lambda_kd: NotNegative = 0.5  # lambda, weight of the distillation
    temperature: Positive = 3.0  # T
    teacher: Literal["train", "eval"] = "train"  # how v_k normalises: by the batch, as the authors' code, or not

    headline: ClassVar[str] = "personalised"

    def client(self, site: Site) -> Own:
        """No v_k yet."""
        return Own({})

    def train(self, state: Own, message: Model, site: Site) -> Trained:  # type: ignore[override]
        shared = message.theta.dense()
        model = site.model(state.theta | shared)
        if state.theta:
            teacher = site.model(state.theta)
            self.train_on(site, Taught(model, teacher, self.teacher), self.loss)
        else:
            self.train_on(site, model)
        state.theta = state_of(model)
        return Trained(Dense({name: state.theta[name] for name in shared}), len(site.train))

    def loss(self, logits: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        """CE + lambda T^2 KL, of the student's and the teacher's logits (n, C)."""
        student, teacher = logits
        return F.cross_entropy(student, labels) + self.lambda_kd * distillation_loss(teacher, student, self.temperature)

    def local_model(self, state: Own, site: Site) -> nn.Module | None:
        return site.model(state.theta) if state.theta else None


class Taught(nn.Module):
    """A model beside its teacher, which does not learn: the outputs of both."""

    def __init__(self, student: nn.Module, teacher: nn.Module, mode: Literal["train", "eval"]) -> None:
        super().__init__()
        self.student, self.teacher, self.mode = student, teacher.requires_grad_(False), mode

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        teacher = in_training(self.teacher) if self.mode == "train" else self.teacher.eval()
        return self.student(x), teacher(x)
