"""Co-Boosting: Dai, Zhang, Li, Liu, Yang, Han, "Enhancing One-Shot Federated Learning Through Data and Ensemble
Co-Boosting", ICLR 2024.

The clients train and upload once; the server's ensemble is A_w(x) = sum_m w_m f_m(x) / sum_m w_m, at first with equal
weights. In every epoch it trains a new generator of images that are hard for the ensemble (L_H, cross-entropy weighted
by 1 - p_y) and on which the student disagrees with it (L_A). It then moves the weights by the sign of the gradient of
A_w's cross-entropy on the earlier images. The student is distilled from A_w on all images, each perturbed slightly in
the direction in which a random mixture of A_w's outputs grows fastest.

Bytes per client, in its one round, before lossless coding: nothing down (the first model is drawn from the seed), 4 D
up, where D counts the model's values with batch-norm buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.ranges import BelowOne, Count, NotNegative, Positive, Several, Share
from fewbytes.core.problem import Problem
from fewbytes.core.training import prepared
from fewbytes.methods.parts.distillation import (
    Generator,
    ImagePool,
    adversarial_loss,
    distillation_loss,
    frozen,
    lowest,
    shuffled,
    step,
)
from fewbytes.methods.parts.one_shot import Distilled, Uploads, check_images, shorter
from fewbytes.models import LogitMean


@dataclass(frozen=True)
class CoBoosting(Distilled):
    """Hyper-parameters of Co-Boosting; its code's values."""

    server_epochs: Count = 200  # each trains a new generator, then weights and student on all images
    generator_steps: Count = 30
    server_batch: Several = 128  # images per generator, and batch size of weights and student
    latent: Count = 256
    generator_lr: Positive = 1e-3  # of Adam
    hardness: NotNegative = 1.0  # h, exponent of 1 - p_y
    lambda_adv: NotNegative = 1.0
    mu: NotNegative = 0.01  # step size of the ensemble's weights
    mu_decay: Share = 0.99  # factor on mu per epoch
    epsilon: NotNegative = 8 / 255  # maximum perturbation of a pixel
    server_lr: Positive = 0.01  # SGD, cosine schedule to 0
    server_momentum: BelowOne = 0.9
    server_weight_decay: NotNegative = 1e-4
    server_clip: Positive = 10.0  # maximum gradient norm of generator and student
    temperature: Positive = 4.0

    promises = replace(Distilled.promises, float32_only=True)

    def quick(self, epochs: int) -> Self:
        """As in `Method`, with a student that learns fast from few images."""
        local = shorter(self.local, epochs)
        return replace(
            self, local=local, server_epochs=40, generator_steps=5, server_batch=32, latent=32, server_lr=0.1
        )

    def server(self, problem: Problem) -> Uploads:
        check_images(problem, "CoBoosting")
        return Uploads()

    def distil(self, student: nn.Module, teacher: LogitMean, problem: Problem) -> None:
        shape, device = problem.sample_shape, problem.device
        classes = teacher(torch.zeros(1, *shape, device=device)).shape[1]
        w = torch.full((len(teacher.members),), 1 / len(teacher.members), device=device)

        def ensemble(x: Tensor) -> Tensor:
            return weighted(teacher.each(x), w)

        pool = ImagePool(self.server_epochs * self.server_batch)
        optimiser = torch.optim.SGD(
            student.parameters(), self.server_lr, self.server_momentum, weight_decay=self.server_weight_decay
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.server_epochs)
        for epoch in range(self.server_epochs):
            y = torch.randint(classes, (self.server_batch,)).to(device)
            images = self.generate(student, ensemble, y, shape)
            if epoch:
                for rows in shuffled(len(pool), self.server_batch):
                    x, labels = pool.take(rows)
                    with torch.no_grad():
                        logits = teacher.each(x)
                    w = boosted(w, logits, labels, self.mu * self.mu_decay**epoch)
            pool.add(images, y)
            for rows in shuffled(len(pool), self.server_batch):
                x, _ = pool.take(rows)
                x = diversified(x, ensemble, 2 * torch.rand(len(x), classes).to(device) - 1, self.epsilon)
                with torch.no_grad():
                    t = ensemble(x)
                step(optimiser, distillation_loss(t, student(x), self.temperature), self.server_clip)
            schedule.step()

    def generate(
        self, student: nn.Module, ensemble: Callable[[Tensor], Tensor], y: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        """An image per class y (n,), hard for the ensemble, from a generator trained only for them."""
        generator = prepared(Generator(self.latent, shape)).to(y.device)
        z = torch.randn(len(y), self.latent).to(y.device).requires_grad_()
        optimiser = torch.optim.Adam([z, *generator.parameters()], self.generator_lr, (0.5, 0.999))

        def clipped(*_: object) -> None:
            nn.utils.clip_grad_norm_(generator.parameters(), self.server_clip)

        def objective() -> tuple[Tensor, Tensor]:
            images = generator(z)
            t, s = ensemble(images), student(images)
            apart = adversarial_loss(t, s, temperature=3.0, masked=False)
            return images, hard_loss(t, y, self.hardness) + self.lambda_adv * apart

        optimiser.register_step_pre_hook(clipped)
        with frozen(student):
            return lowest(self.generator_steps, objective, optimiser)


def weighted(logits: Tensor, w: Tensor) -> Tensor:
    """A_w: the mean (n, classes) of the members' logits (m, n, classes), weighted by w (m,), normalised by its sum."""
    return torch.einsum("m,mnc->nc", w / w.sum(), logits)


def hard_loss(logits: Tensor, y: Tensor, hardness: float) -> Tensor:
    """L_H: the mean cross-entropy, each sample's times (1 - p_y)^h, through which no gradient flows."""
    each = F.cross_entropy(logits, y, reduction="none")
    return ((1 - (-each.detach()).exp()) ** hardness * each).mean()


def boosted(w: Tensor, logits: Tensor, y: Tensor, step: float) -> Tensor:
    """The weights (m,), each moved by `step` against the sign of the gradient of A_w's cross-entropy, within [0, 1].

    Weights stay unchanged if all would become 0.
    """
    w = w.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(weighted(logits, w), y), w)
    moved = (w.detach() - step * gradient.sign()).clamp(0, 1)
    return moved if moved.any() else w.detach()


def diversified(x: Tensor, ensemble: Callable[[Tensor], Tensor], u: Tensor, epsilon: float) -> Tensor:
    """Samples moved by epsilon, each value up or down, so that u (n, classes) times the probabilities grows.

    The probabilities are the ensemble's at temperature 4.
    """
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad((u * F.softmax(ensemble(x) / 4, 1)).sum(), x)
    return x.detach() + epsilon * gradient.sign()
