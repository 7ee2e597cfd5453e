"""Fed-ADI: Yin, Molchanov, Alvarez, Li, Mallya, Hoiem, Jha, Kautz, "Dreaming to Distill: Data-Free Knowledge Transfer
via DeepInversion", CVPR 2020, with the ensemble of the clients' models as its teacher.

The clients train and upload once. The server generates images by gradient descent on pixels. The loss asks for given
classes (cross-entropy of the ensemble), its batch-norm statistics (Eq. 4), smoothness (total variation, Eq. 3) and
disagreement with the student (one minus the Jensen-Shannon divergence, Eq. 7 and 8). After every batch of images the
student is distilled from the ensemble on all images generated so far.

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
from fewbytes.core.training import ready
from fewbytes.methods.parts.distillation import (
    ImagePool,
    batch_norm_terms,
    competition_loss,
    distillation_loss,
    endless,
    frozen,
    lowest,
    rolled_and_flipped,
    step,
    total_variation,
)
from fewbytes.methods.parts.one_shot import Distilled, Uploads, check_images, shorter
from fewbytes.models import LogitMean


@dataclass(frozen=True)
class FedADI(Distilled):
    """Hyper-parameters of Fed-ADI: those of the paper's code for its CIFAR-10 models; the student's as in Fed-DAFL."""

    server_epochs: Count = 200  # batches of images
    pixel_steps: Count = 1_000  # Adam steps per batch of images
    pixel_lr: Positive = 0.1
    server_batch: Several = 256
    lambda_bn: NotNegative = 10.0
    lambda_tv: NotNegative = 2.5e-5
    lambda_l2: NotNegative = 0.0
    lambda_adv: NotNegative = 1.0
    server_steps: Count = 400  # SGD steps of the student per batch of images, cosine schedule to 0
    server_lr: Positive = 0.1
    server_momentum: BelowOne = 0.9
    server_weight_decay: NotNegative = 1e-4
    temperature: Positive = 20.0

    def quick(self, epochs: int) -> Self:
        return replace(
            self, local=shorter(self.local, epochs), server_epochs=2, pixel_steps=20, server_steps=60, server_batch=32
        )

    def server(self, problem: Problem) -> Uploads:
        check_images(problem, "FedADI")
        return Uploads()

    def distil(self, student: nn.Module, teacher: LogitMean, problem: Problem) -> None:
        pool = ImagePool(self.server_epochs * self.server_batch)
        optimiser = torch.optim.SGD(
            student.parameters(), self.server_lr, self.server_momentum, weight_decay=self.server_weight_decay
        )
        steps = self.server_epochs * self.server_steps
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(self.server_epochs):
            images = self.dream(student, teacher, problem.sample_shape, problem.device)
            with torch.no_grad():
                pool.add(images, teacher(images))
            for _, rows in zip(range(self.server_steps), endless(len(pool), self.server_batch), strict=False):
                x, logits = pool.take(rows)
                step(optimiser, distillation_loss(logits, student(x), self.temperature))
                schedule.step()

    def dream(self, student: nn.Module, teacher: LogitMean, shape: tuple[int, ...], device: str) -> Tensor:
        """A batch of images that the teacher assigns to random classes."""
        images = ready(torch.randn(self.server_batch, *shape).to(device)).requires_grad_()
        classes = teacher(images[:1]).shape[1]
        y = torch.randint(classes, (self.server_batch,)).to(device)
        optimiser = torch.optim.Adam([images], self.pixel_lr)
        with frozen(student), batch_norm_terms(teacher) as terms:

            def objective() -> tuple[Tensor, Tensor]:
                terms.clear()
                seen = rolled_and_flipped(images)
                t = teacher(seen)
                loss = F.cross_entropy(t, y) + self.lambda_adv * competition_loss(t, student(seen))
                loss = loss + self.lambda_tv * total_variation(seen) + self.lambda_l2 * seen.norm()
                return images, loss + self.lambda_bn * sum(terms) / len(teacher.members)

            return lowest(self.pixel_steps, objective, optimiser)
