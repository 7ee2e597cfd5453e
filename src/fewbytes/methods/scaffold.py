"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", ICML 2020, Algorithm 1 with option II.

Every client keeps a control variate c_i, the server their mean c; a client steps by g_i(y_i) - c_i + c, so that it does
not drift to its own optimum. After its K steps c_i+ = c_i - c + (x - y_i) / (K eta_l). This equals the mean of
g_i(y_i), and is computed as such. The server, with N clients: x <- x + eta_g mean (y_i - x), c <- c + |S| / N mean
(c_i+ - c_i), plain means. Batch-norm statistics are averaged as they are.

Bytes per client and round, before lossless coding: 4 (D + d) down, 4 (D + d) up, where d of the model's D values are
parameters: the model and a control variate, in either direction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from fewbytes.base.ranges import LEARNT, MODEL, SENT, WHOLE, Positive, Share
from fewbytes.base.state import State, copied, state_of, trained_entries, trained_parameters, zeros_for_sums
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.averaging import GlobalModel, first_shared, learnt_entries, parameters_among
from fewbytes.wire import Dense, payload


@payload
class Controlled:
    """Server to client: x and c."""

    theta: Annotated[Dense, MODEL]
    control: Dense


@payload
class Corrected:
    """Client to server: y_i and c_i+ - c_i."""

    theta: Annotated[Dense, SENT]
    change: Annotated[Dense, WHOLE, LEARNT]


@dataclass
class ControlledModel(GlobalModel):
    """The server's state."""

    control: State  # c, of the parameters


@dataclass
class Control:
    """A client's state."""

    control: State  # c_i; empty, which means 0, before its first training


@dataclass(frozen=True)
class SCAFFOLD(Method):
    """Hyper-parameters of SCAFFOLD."""

    fraction: Share = 1.0
    local: Local = Local(epochs=1, lr=0.01, batch=10)  # eta_l
    server_lr: Positive = 1.0  # eta_g

    promises = Promises(sends="its whole model, and a control variate of the same size", aggregates=EVERY_RULE)

    def server(self, problem: Problem) -> ControlledModel:
        model = problem.first_model()
        theta = first_shared(problem, trained_entries(model)).theta
        return ControlledModel(theta, {name: torch.zeros_like(theta[name]) for name in learnt_entries(model)})

    def client(self, site: Site) -> Control:
        return Control({})

    def round(self, state: ControlledModel, net: Network, t: int) -> None:
        y, change, replies = net.mean(state.theta), net.mean(), 0
        send = Controlled(Dense(state.theta), Dense(state.control))
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=send):
            y.add(reply.theta.dense())
            change.add(reply.change.dense())
            replies += 1
        x, mean, part = state.theta, y(), replies / len(net.clients)
        state.theta = mean | {name: x[name] + self.server_lr * (mean[name] - x[name]) for name in state.control}
        state.control = state.control | {name: state.control[name] + part * d for name, d in change().items()}

    def train(self, state: Control, message: Controlled, site: Site) -> Corrected:
        c, model = message.control.dense(), site.model(message.theta.dense())
        parameters = trained_parameters(model)
        own = state.control or {name: torch.zeros_like(c[name]) for name in parameters}
        gradients = Gradients(parameters, {name: c[name] - own[name] for name in parameters})
        site.fit(model, self.local, before_step=gradients.correct)
        site.score("personalised", model)
        state.control = gradients.mean() or own
        return Corrected(Dense(state_of(model)), Dense({name: state.control[name] - own[name] for name in own}))

    def join(self, state: ControlledModel, net: Network, client: Id) -> None:
        """Keep c the mean of all c_i: a newcomer's is 0."""
        clients = len(net.clients)
        state.control = {name: value * ((clients - 1) / clients) for name, value in state.control.items()}

    def global_model(self, state: ControlledModel, problem: Problem) -> nn.Module:
        return problem.first_model(state.theta)

    def observed(self, model: nn.Module) -> list[str]:
        return parameters_among(model, trained_entries(model))


class Gradients:
    """The gradients g_i(y_i) of local training: corrected by c - c_i before each step, and their mean."""

    def __init__(self, parameters: dict[str, nn.Parameter], correction: State) -> None:
        self.parameters, self.steps = parameters, 0
        self.correction = {name: correction[name].to(p.device) for name, p in parameters.items()}
        self.total = {name: zeros_for_sums(p) for name, p in parameters.items()}

    def correct(self, again: Callable[[], Tensor]) -> None:
        """For `site.fit(…, before_step=…)`."""
        self.steps += 1
        for name, p in self.parameters.items():
            if p.grad is not None:
                self.total[name] += p.grad
                p.grad += self.correction[name]

    def mean(self) -> State:
        """c_i+; empty if there was no step."""
        if not self.steps:
            return {}
        return {name: copied((self.total[name] / self.steps).to(p.dtype)) for name, p in self.parameters.items()}
