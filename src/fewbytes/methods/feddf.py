"""FedDF: Lin, Kong, Stich, Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020,
Algorithm 1, in one round.

The clients train and upload once; the server starts from the mean of their models and distils the ensemble into it on
unlabelled public data, minimising KL(softmax(mean_m f_m(x)) || softmax(s(x))) (Algorithm 1's AVGLOGITS). The data are
the task's `public` samples (`--public`); without any, Gaussian noise. Training stops when the loss on held-out samples
no longer falls, and the best model is kept.

Bytes per client, in its one round, before lossless coding: nothing down (the first model is drawn from the seed), 4 D
up, where D counts the model's values with batch-norm buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import nn

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import Count, Positive, Several
from fewbytes.base.state import Mean, load_state, state_of
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.training import ready
from fewbytes.methods.parts.distillation import distillation_loss, endless, logits_of, noise, step
from fewbytes.methods.parts.one_shot import Distilled, Uploads, shorter
from fewbytes.models import LogitMean

CHECK_EVERY = 100  # steps


@dataclass(frozen=True)
class FedDF(Distilled):
    """Hyper-parameters of FedDF; its code's values."""

    server_steps: Count = 10_000  # maximum number of Adam steps, cosine schedule to 0
    patience: Count = 1_000  # steps without improvement after which it stops
    server_batch: Several = 128
    server_lr: Positive = 1e-3
    server_clip: Positive = 5.0  # maximum gradient norm
    noise: Several = 5_000  # Gaussian noise samples, if the task has no public data

    def quick(self, epochs: int) -> Self:
        return replace(self, local=shorter(self.local, epochs), server_steps=300, server_batch=50)

    def server(self, problem: Problem) -> Uploads:
        if problem.public is None and not problem.blank().is_floating_point():
            raise UserError("FedDF without public data distils on noise, but samples are integers: give public data")
        return Uploads()

    def round(self, state: Uploads, net: Network, t: int) -> None:
        super().round(state, net, t)
        mean, layout = Mean(), net.problem.layout
        same_model = [
            theta for m, theta in state.models.items() if layout(m) == layout(0)
        ]  # the others are only teachers
        for theta in same_model:
            mean.add(theta)
        state.student = mean() if same_model else None

    def distil(self, student: nn.Module, teacher: LogitMean, problem: Problem) -> None:
        data = noise(self.noise, problem.sample_shape) if problem.public is None else problem.public
        if len(data) < 2:
            raise UserError(f"FedDF needs at least 2 samples, to distil on and to validate, not {len(data)}")
        targets = logits_of(teacher, data, problem.device)
        order = torch.randperm(len(data))
        held_out, used = order.tensor_split([max(1, len(data) // 10)])
        unseen = data.take(held_out)
        optimiser = torch.optim.Adam(student.parameters(), self.server_lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.server_steps)
        best, best_at, theta = math.inf, 0, state_of(student)
        for number, rows in zip(range(1, self.server_steps + 1), endless(len(used), self.server_batch), strict=False):
            x = ready(data.take(used[rows]).load(problem.device)[0])
            step(optimiser, distillation_loss(targets[used[rows]], student(x)), self.server_clip)
            schedule.step()
            if number % CHECK_EVERY == 0 or number == self.server_steps:
                loss = float(distillation_loss(targets[held_out], logits_of(student, unseen, problem.device)))
                if loss < best:
                    best, best_at, theta = loss, number, state_of(student)
                elif number - best_at >= self.patience:
                    break
        load_state(student, theta)
