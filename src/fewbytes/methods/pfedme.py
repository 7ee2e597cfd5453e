"""pFedMe: Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1.

Each client keeps its own model theta_i near the shared one, and the shared one learns from where the clients' models
went, instead of from gradients. For every batch client i finds (1) theta_i = argmin f_i(theta; batch) + lambda/2
||theta - w||^2, approximately, by K steps of size alpha from the theta_i of the batch before; then it moves its copy of
the shared model: (2) w <- w - eta lambda (w - theta_i), by the gradient of f_i's Moreau envelope. The server takes
(3) w <- (1 - beta) w + beta mean w_i, a plain mean. Batch-norm statistics are those of theta_i, averaged as they are.

Bytes per client and round, before lossless coding: 4 D down, 4 D up, where D counts the model's values (with
batch-norm buffers); theta_i costs none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Self

import torch
from torch import Tensor, nn

from fewbytes.base.ranges import SENT, Count, Positive, Share
from fewbytes.base.state import state_of, trained_entries, trained_parameters
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import averaging
from fewbytes.methods.parts.averaging import GlobalModel, Model, Own
from fewbytes.wire import Dense, payload


@payload
class Moved:
    """Client to server: w_i."""

    theta: Annotated[Dense, SENT]


@dataclass(frozen=True)
class PFedMe(Method):
    """Hyper-parameters of pFedMe; the authors' code's values for MNIST and a network with a hidden layer."""

    fraction: Share = 1.0
    local: Local = Local(steps=20, lr=0.005, batch=20)  # R, eta
    lambda_near: Positive = 15.0  # lambda, weight of the distance from w
    personal_steps: Count = 5  # K, steps of theta_i for each batch
    personal_lr: Positive = 0.09  # alpha, learning rate of theta_i
    beta: Positive = 1.0  # how far the server goes towards the mean

    promises = Promises(
        sends="its copy of the shared model",
        headline="personalised",
        aggregates=EVERY_RULE,
        protects={"clients"},
        sums=True,
    )

    def quick(self, epochs: int) -> Self:
        return replace(self, local=replace(self.local, epochs=epochs, steps=0))

    def server(self, problem: Problem) -> GlobalModel:
        return averaging.first_shared(problem, trained_entries(problem.first_model()))

    def client(self, site: Site) -> Own:
        """No theta_i yet."""
        return Own({})

    def round(self, state: GlobalModel, net: Network, t: int) -> None:
        mean = net.mean(state.theta)
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=Model(Dense(state.theta))):
            mean.add(reply.theta.dense())
        moved, w = mean(), state.theta
        change = averaging.mean_change(w, moved, averaging.learnt(net.problem, w))
        state.theta = moved | {name: (w[name] + self.beta * d).to(w[name].dtype) for name, d in change.items()}  # (3)

    def train(self, state: Own, message: Model, site: Site) -> Moved:
        model = site.model(message.theta.dense())
        envelope = Envelope(trained_parameters(model), self)
        site.fit(model, self.local, before_step=envelope.solve, after_step=envelope.resume)
        state.theta = state_of(model)
        envelope.restore()
        return Moved(Dense(state_of(model)))

    def global_model(self, state: GlobalModel, problem: Problem) -> nn.Module:
        return problem.first_model(state.theta)

    def local_model(self, state: Own, site: Site) -> nn.Module | None:
        return averaging.own_model(state, site)

    def observed(self, model: nn.Module) -> list[str]:
        return averaging.parameters_among(model, trained_entries(model))


class Envelope:
    """w and theta_i of local training: the model's parameters hold theta_i while gradients are computed, and w when
    local training's step moves them by the envelope's gradient."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], terms: PFedMe) -> None:
        self.parameters, self.terms = list(parameters.values()), terms
        self.w = [p.detach().clone() for p in self.parameters]
        self.theta = list(self.w)

    def solve(self, again: Callable[[], Tensor]) -> None:
        """For `site.fit(…, before_step=…)`: (1), from the batch's gradients at theta_i, which `again` renews."""
        near, lr = self.terms.lambda_near, self.terms.personal_lr
        for k in range(self.terms.personal_steps):
            if k:
                again()
            for p, w in zip(self.parameters, self.w, strict=True):
                if p.grad is not None:
                    p.data.sub_(lr * regularised(p.grad, p.detach(), w, near))
        self.theta = [p.detach().clone() for p in self.parameters]
        self.restore()
        for p, theta, w in zip(self.parameters, self.theta, self.w, strict=True):
            if p.grad is not None:
                p.grad = envelope_gradient(w, theta, near)

    def resume(self) -> None:
        """For `site.fit(…, after_step=…)`: keep the moved w, and let the parameters hold theta_i again."""
        self.w = [p.detach().clone() for p in self.parameters]
        for p, theta in zip(self.parameters, self.theta, strict=True):
            p.data.copy_(theta)

    def restore(self) -> None:
        """Let the parameters hold w."""
        for p, w in zip(self.parameters, self.w, strict=True):
            p.data.copy_(w)


def regularised(gradient: Tensor, theta: Tensor, w: Tensor, near: float) -> Tensor:
    """The gradient of (1): gradient + near (theta - w)."""
    return torch.add(gradient, theta - w, alpha=near)


def envelope_gradient(w: Tensor, theta: Tensor, near: float) -> Tensor:
    """The Moreau envelope's gradient at w, whose minimiser is theta: near (w - theta)."""
    return near * (w - theta)
