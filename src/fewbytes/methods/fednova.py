"""FedNova: Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020, its section on FedNova.

Clients may take different numbers of local steps tau_i, and a plain mean of their models then favours those that take
more. (1) Each sends its change divided by its length, d_i = (y_i - x) / |a_i|_1, where a_i weights its gradients; for
plain SGD, |a_i|_1 = tau_i. The server goes (2) tau_eff = sum_i p_i |a_i|_1 such normalised steps, with p_i = n_i / n:
(3) x <- x + tau_eff sum_i p_i d_i. Batch-norm statistics are averaged as they are.

Bytes per client and round, before lossless coding: 4 D down, 4 D up, where D counts the model's values (with
batch-norm buffers), and a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import nn

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import LEARNT, SENT, STATISTICS, NotNegative, Samples, Share
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import CLIPPING, EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import compressed
from fewbytes.methods.parts.averaging import Model
from fewbytes.methods.parts.compressed import ServerModel
from fewbytes.methods.parts.proximal import proximal
from fewbytes.wire import Dense, payload


@payload
class Normalised:
    """Client to server: d_i, |a_i|_1, the batch-norm statistics, and the number of training samples."""

    change: Annotated[Dense, SENT, LEARNT]
    buffers: Annotated[Dense, SENT, STATISTICS]
    length: Annotated[float, Meta(gt=0, le=1e12)]
    samples: Samples


@dataclass(frozen=True)
class FedNova(Method):
    """Hyper-parameters of FedNova."""

    fraction: Share = 1.0
    local: Local = Local(epochs=2, lr=0.02, batch=32)  # E, eta, B
    mu: NotNegative = 0.0  # weight of the proximal term, FedProx's; 0: none

    promises = Promises(
        sends="its change of the model, divided by its steps",
        aggregates=EVERY_RULE - CLIPPING,  # a norm is of whole changes, and these are of one step
        normalises_steps=True,
    )

    def __post_init__(self) -> None:
        if self.local.optimiser not in ("sgd", "nesterov"):
            raise UserError(
                f"FedNova normalises steps of SGD, with or without momentum, and optimiser is {self.local.optimiser}: "
                "use sgd or nesterov"
            )
        if self.mu * self.local.lr >= 1:
            raise UserError(f"mu times lr must be below 1, and mu is {self.mu:g}, lr {self.local.lr:g}: lower either")

    def server(self, problem: Problem) -> ServerModel:
        return compressed.first_server_model(problem)

    def round(self, state: ServerModel, net: Network, t: int) -> None:
        mean, lengths = net.mean(state.buffers), net.mean()
        cohort = net.sample(self.fraction)
        for _, reply in net.call(self.train, to=cohort, send=compressed.message(state)):
            mean.add(reply.change.dense() | reply.buffers.dense(), weight=reply.samples)
            lengths.add({"length": torch.tensor([reply.length])}, weight=reply.samples)
        taken, effective = mean(), float(lengths()["length"])
        state.buffers = {name: taken[name] for name in state.buffers}
        direction = {name: effective * value for name, value in taken.items() if name in state.theta}
        state.theta = compressed.moved(state.theta, direction)

    def train(self, state: None, message: Model, site: Site) -> Normalised:
        local, near = site.lasting(self.local), None
        if self.mu:
            near = proximal(self.mu, message.theta.dense(), site.device)
        change, buffers = compressed.trained_change(message, site, local, extra=near)
        steps = site.steps(local)
        length = normaliser(steps, local.momentum, local.optimiser == "nesterov", self.mu * local.lr_in(site.round))
        site.measure("local steps", steps)
        return Normalised(
            Dense({name: value / length for name, value in change.items()}), buffers, length, len(site.train)
        )

    def global_model(self, state: ServerModel, problem: Problem) -> nn.Module:
        return compressed.whole(state, problem)

    def observed(self, model: nn.Module) -> list[str]:
        return [name for name, p in model.named_parameters() if p.requires_grad]


def normaliser(steps: int, momentum: float = 0.0, nesterov: bool = False, near: float = 0.0) -> float:
    """|a_i|_1: how far `steps` of SGD go, in units of the learning rate, along a gradient that is always 1; at least 1.

    `near`: eta mu of a proximal term. Without momentum and term, a_i is all ones; with momentum rho its entries are
    (1 - rho^(tau-k)) / (1 - rho), with the term (1 - eta mu)^(tau-1-k).
    """
    velocity = gone = 0.0
    for _ in range(steps):
        gradient = 1 - near * gone
        velocity = momentum * velocity + gradient
        gone += gradient + momentum * velocity if nesterov else velocity
    return max(gone, 1.0)
