"""DENSE: Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu, "DENSE: Data-Free One-Shot Federated Learning", NeurIPS 2022,
Algorithm 1.

The clients train and upload once. In every epoch the server trains a new generator of images that the
ensemble classifies as intended (cross-entropy), that match its batch-norm statistics and on which the student disagrees
(adversarial term): L_gen = CE + lambda_bn L_bn + lambda_adv L_adv. The student is then distilled from the ensemble on
all images generated so far.

Bytes per client, in its one round, before lossless coding: nothing down (the first model is drawn from the seed), 4 D
up, where D counts the model's values with batch-norm buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.ranges import BelowOne, Count, NotNegative, Positive, Several
from fewbytes.core.problem import Problem
from fewbytes.core.training import prepared
from fewbytes.methods.parts.distillation import (
    Generator,
    ImagePool,
    adversarial_loss,
    batch_norm_terms,
    distillation_loss,
    frozen,
    lowest,
    shifted_and_flipped,
    shuffled,
    step,
)
from fewbytes.methods.parts.one_shot import Distilled, Uploads, check_images, shorter
from fewbytes.models import LogitMean


@dataclass(frozen=True)
class DENSE(Distilled):
    """Hyper-parameters of DENSE; its code's values."""

    server_epochs: Count = 200  # each trains a new generator, then the student on all images
    generator_steps: Count = 30  # T_G
    server_batch: Several = 256  # images per generator, and batch size of the student
    latent: Count = 256
    generator_lr: Positive = 1e-3  # of Adam
    lambda_ce: NotNegative = 1.0
    lambda_bn: NotNegative = 1.0
    lambda_adv: NotNegative = 1.0
    server_lr: Positive = 0.005
    server_momentum: BelowOne = 0.9
    temperature: Positive = 20.0

    def quick(self, epochs: int) -> Self:
        """As in `Method`, with a student that learns fast from few images."""
        local = shorter(self.local, epochs)
        return replace(
            self, local=local, server_epochs=40, generator_steps=5, server_batch=32, latent=32, server_lr=0.1
        )

    def server(self, problem: Problem) -> Uploads:
        check_images(problem, "DENSE")
        return Uploads()

    def distil(self, student: nn.Module, teacher: LogitMean, problem: Problem) -> None:
        pool = ImagePool(self.server_epochs * self.server_batch)
        optimiser = torch.optim.SGD(student.parameters(), self.server_lr, self.server_momentum)
        for _ in range(self.server_epochs):
            images = self.generate(student, teacher, problem.sample_shape, problem.device)
            with torch.no_grad():
                pool.add(images, teacher(images))
            for rows in shuffled(len(pool), self.server_batch):
                x, logits = pool.take(rows)
                step(optimiser, distillation_loss(logits, student(x), self.temperature))

    def generate(self, student: nn.Module, teacher: LogitMean, shape: tuple[int, ...], device: str) -> Tensor:
        """A batch of images, from a generator trained only for them."""
        generator = prepared(Generator(self.latent, shape)).to(device)
        z = torch.randn(self.server_batch, self.latent).to(device).requires_grad_()
        classes = teacher(torch.zeros(1, *shape, device=device)).shape[1]
        y = torch.randint(classes, (self.server_batch,)).sort().values.to(device)
        optimiser = torch.optim.Adam([z, *generator.parameters()], self.generator_lr, (0.5, 0.999))
        with frozen(student), batch_norm_terms(teacher) as terms:

            def objective() -> tuple[Tensor, Tensor]:
                terms.clear()
                images = generator(z)
                seen = shifted_and_flipped(images)
                t, s = teacher(seen), student(seen)
                loss = self.lambda_ce * F.cross_entropy(t, y) + self.lambda_adv * adversarial_loss(t, s)
                return images, loss + self.lambda_bn * sum(terms) / len(teacher.members)

            return lowest(self.generator_steps, objective, optimiser)
