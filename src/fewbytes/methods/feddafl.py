"""Fed-DAFL: Chen, Wang, Xu, Yang, Liu, Shi, Xu, Xu, Tian, "Data-Free Learning of Student Networks", ICCV 2019, with the
ensemble of the clients' models as its teacher.

The clients train and upload once. The server trains a generator of images to which the ensemble gives confident
predictions (one-hot loss), large features (activation loss) and all classes equally often (information entropy):
L = L_oh + alpha L_a + beta L_ie (Eq. 7). A student is distilled from the ensemble on fresh images of that generator.

Bytes per client, in its one round, before lossless coding: nothing down (the first model is drawn from the seed), 4 D
up, where D counts the model's values with batch-norm buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import nn

from fewbytes.base.ranges import BelowOne, Count, NotNegative, Positive, Several
from fewbytes.core.problem import Problem
from fewbytes.core.training import prepared
from fewbytes.methods.parts.distillation import (
    Generator,
    activation_loss,
    balance_loss,
    classifier_inputs,
    distillation_loss,
    one_hot_loss,
    step,
)
from fewbytes.methods.parts.one_shot import Distilled, Uploads, check_images, shorter
from fewbytes.models import LogitMean


@dataclass(frozen=True)
class FedDAFL(Distilled):
    """Hyper-parameters of Fed-DAFL; those of the re-implementation that DENSE's code builds on."""

    server_steps: Count = 80_000  # SGD steps of the student, cosine schedule to 0
    student_steps: Count = 5  # student steps per generator step
    server_batch: Several = 256
    latent: Count = 512
    generator_lr: Positive = 1e-3  # of Adam
    lambda_oh: NotNegative = 1.0
    lambda_act: NotNegative = 1e-3
    lambda_bal: NotNegative = 20.0  # entropy in nats
    server_lr: Positive = 0.1
    server_momentum: BelowOne = 0.9
    server_weight_decay: NotNegative = 1e-4
    temperature: Positive = 20.0

    def quick(self, epochs: int) -> Self:
        return replace(
            self, local=shorter(self.local, epochs), server_steps=300, student_steps=2, server_batch=32, latent=32
        )

    def server(self, problem: Problem) -> Uploads:
        check_images(problem, "FedDAFL")
        return Uploads()

    def distil(self, student: nn.Module, teacher: LogitMean, problem: Problem) -> None:
        generator = prepared(Generator(self.latent, problem.sample_shape)).to(problem.device)
        generating = torch.optim.Adam(generator.parameters(), self.generator_lr, (0.5, 0.999))
        optimiser = torch.optim.SGD(
            student.parameters(), self.server_lr, self.server_momentum, weight_decay=self.server_weight_decay
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.server_steps)
        for number in range(self.server_steps):
            if number % self.student_steps == 0:
                with classifier_inputs(teacher.members) as features:
                    t = teacher(generator(torch.randn(self.server_batch, self.latent).to(problem.device)))
                activation = sum(map(activation_loss, features)) / len(teacher.members)
                loss = self.lambda_oh * one_hot_loss(t) + self.lambda_act * activation
                step(generating, loss + self.lambda_bal * balance_loss(t))
            with torch.no_grad():
                x = generator(torch.randn(self.server_batch, self.latent).to(problem.device))
                t = teacher(x)
            step(optimiser, distillation_loss(t, student(x), self.temperature))
            schedule.step()
