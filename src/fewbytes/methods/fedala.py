"""FedALA: Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated
Learning", AAAI 2023, Algorithm 1.

A client takes of the server's model as much as helps its own data, value by value, before it trains. In its last p
layers it starts from (1) theta-hat_i = theta_i + (theta - theta_i) * W_i, where theta_i is what it trained last and
W_i, in [0, 1], starts at 1; the other layers are the server's. It learns W_i with all else frozen, on a part s of its
samples: (2) W_i <- clip(W_i - eta (theta - theta_i) * grad L(theta-hat_i), 0, 1). The first time it passes over them
until the loss settles, later once. The server averages the trained models by the clients' numbers of samples.

Bytes per client and round, before lossless coding: 4 D down, 4 D up, where D counts the model's values (with
batch-norm buffers); W_i costs none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import Count, Positive, Share
from fewbytes.base.state import State, copied, state_of, trained_entries, trained_parameters, zeros_for_sums
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import averaging
from fewbytes.methods.parts.averaging import GlobalModel, Model, Own, Trained
from fewbytes.models.layers import layers_of
from fewbytes.wire import Dense

LOSSES = 10  # of the last passes, whose deviation says whether the loss has settled


@dataclass
class Weighted(Own):
    """A client's state: theta_i, and W_i."""

    weights: State  # of the last p layers; empty before they are first learnt


@dataclass(frozen=True)
class FedALA(Method):
    """Hyper-parameters of FedALA; the paper's."""

    fraction: Share = 1.0  # rho
    local: Local = Local(epochs=1, lr=0.005, batch=10)
    layers: Count = 1  # p, the number of last layers that are aggregated by weights
    portion: Share = 0.8  # s, of a client's batches, on which it learns its weights
    weight_lr: Positive = 1.0  # eta, learning rate of the weights
    settled: Positive = 0.1  # standard deviation of ten passes' losses, below which the first passes end
    first_passes: Count = 50  # maximum number of a client's first passes

    promises = Promises(
        sends="its whole model", headline="personalised", aggregates=EVERY_RULE, protects={"clients"}, sums=True
    )

    def server(self, problem: Problem) -> GlobalModel:
        model = problem.first_model()
        last_layers(model, self.layers)  # refuses too many
        return averaging.first_shared(problem, trained_entries(model))

    def client(self, site: Site) -> Weighted:
        return Weighted({}, {})

    def round(self, state: GlobalModel, net: Network, t: int) -> None:
        mean = net.mean(state.theta)
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=Model(Dense(state.theta))):
            mean.add(reply.theta.dense(), weight=reply.samples)
        state.theta = mean()

    def train(self, state: Weighted, message: Model, site: Site) -> Trained:
        theta = message.theta.dense()
        if state.theta:
            theta = theta | self.adapted_layers(state, theta, site)
        model = site.model(theta)
        site.score("combined", model)
        site.fit(model, self.local)
        state.theta = state_of(model)
        return Trained(Dense(state.theta), len(site.train))

    def adapted_layers(self, state: Weighted, theta: State, site: Site) -> State:
        """Learn W_i; returns the last p layers of theta-hat_i."""
        model = site.model(theta)
        last = set(last_layers(model, self.layers))
        for name, p in trained_parameters(model).items():
            p.requires_grad_(name in last)
        mixture = Mixture({name: p for name, p in trained_parameters(model).items() if name in last}, state)
        batches = site.steps(replace(self.local, epochs=1, steps=0))
        one_pass = replace(self.local, steps=max(1, round(self.portion * batches)))
        losses: list[float] = []
        for _ in range(1 if state.weights else self.first_passes):
            losses.append(site.fit(model, one_pass, before_step=mixture.learner(self.weight_lr)))
            if has_settled(losses, self.settled):
                break
        site.measure("passes over weights", len(losses))
        state.weights = {name: copied(w) for name, w in mixture.weights.items()}
        return {name: copied(p) for name, p in mixture.parameters.items()}

    def global_model(self, state: GlobalModel, problem: Problem) -> nn.Module:
        return problem.first_model(state.theta)

    def local_model(self, state: Weighted, site: Site) -> nn.Module | None:
        return averaging.own_model(state, site)

    def observed(self, model: nn.Module) -> list[str]:
        return averaging.parameters_among(model, trained_entries(model))


class Mixture:
    """Parameters that hold theta-hat_i, and its weights W_i; the parameters have the server's values at first."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], state: Weighted) -> None:
        self.parameters = parameters
        self.own = {name: state.theta[name].to(p.device) for name, p in parameters.items()}
        self.difference = {name: p.detach() - self.own[name] for name, p in parameters.items()}
        known = state.weights or {name: zeros_for_sums(own) + 1 for name, own in self.own.items()}
        self.weights = {name: w.to(self.own[name].device) for name, w in known.items()}
        self.place()

    def place(self) -> None:
        """Let the parameters hold theta-hat_i."""
        for name, p in self.parameters.items():
            p.data.copy_(mixed(self.own[name], self.difference[name], self.weights[name]))

    def learner(self, eta: float) -> Callable[[Callable[[], Tensor]], None]:
        """For `site.fit(…, before_step=…)`: W_i learns from each batch, in place of the parameters."""

        def learn(again: Callable[[], Tensor]) -> None:
            for name, p in self.parameters.items():
                if p.grad is not None:
                    self.weights[name] = learnt(self.weights[name], p.grad, self.difference[name], eta)
                    p.grad = None  # so that local training's step leaves it as it is
            self.place()

        return learn


def last_layers(model: nn.Module, p: int) -> list[str]:
    """Names of the parameters of the model's last p layers, linear or convolutional. Raises UserError for too few."""
    layers = list(layers_of(model).values())
    if len(layers) < p:
        raise UserError(f"layers={p}: the model has only {len(layers)} layers to aggregate")
    return [name for layer in layers[-p:] for name in layer]


def mixed(own: Tensor, difference: Tensor, weight: Tensor) -> Tensor:
    """(1): own + difference * weight, elementwise, in own's dtype."""
    return (own + difference * weight).to(own.dtype)


def learnt(weight: Tensor, gradient: Tensor, difference: Tensor, eta: float) -> Tensor:
    """(2), elementwise: weight - eta gradient * difference, clipped to [0, 1]."""
    return torch.clamp(weight - eta * gradient * difference, 0, 1)


def has_settled(losses: Sequence[float], deviation: float) -> bool:
    """Whether the last LOSSES of more losses than that deviate by less than `deviation`."""
    return len(losses) > LOSSES and bool(np.std(losses[-LOSSES:]) < deviation)
