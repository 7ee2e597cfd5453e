"""Base of methods whose clients send compressed model changes; batch-norm statistics are sent uncompressed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from fewbytes.base.state import State, state_of
from fewbytes.core.network import Network
from fewbytes.core.problem import Id, Problem
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.averaging import Model
from fewbytes.wire import Dense, Packages, Quantised, Signs, TopK


class Change(Protocol):
    """A client's reply: its compressed change of the model, and its batch-norm statistics."""

    @property
    def change(self) -> Quantised | Signs | Packages | TopK: ...

    @property
    def buffers(self) -> Dense: ...


@dataclass
class ServerModel:
    """The server's state."""

    theta: State  # the model's parameters
    buffers: State  # its batch-norm statistics


@dataclass
class Residual:
    """A client's state, for error feedback."""

    error: State  # e_i, not sent yet; empty at first

    def added(self, change: State) -> State:
        """Delta_i + e_i."""
        return {name: value + self.error[name] if name in self.error else value for name, value in change.items()}

    def keep(self, wanted: State, sent: State) -> None:
        """Set e_i to the difference of `wanted` and `sent`."""
        self.error = {name: value - sent[name] for name, value in wanted.items()}


def first_server_model(problem: Problem) -> ServerModel:
    """The initial weights: parameters and batch-norm statistics."""
    first, learnt = problem.first_state(), dict(problem.first_model().named_parameters(remove_duplicate=False))
    return ServerModel(
        {name: value for name, value in first.items() if name in learnt},
        {name: value for name, value in first.items() if name not in learnt},
    )


def message(state: ServerModel) -> Model:
    """The whole model, for a round's cohort."""
    return Model(Dense(state.theta | state.buffers))


def take_means(state: ServerModel, replies: Iterable[tuple[Id, Change]], net: Network) -> State:
    """The plain mean of the clients' changes; the mean of their batch-norm statistics replaces the server's."""
    mean = net.mean(state.buffers)
    for _, reply in replies:
        mean.add(reply.change.dense() | reply.buffers.dense())
    received = mean()
    state.buffers = {name: received[name] for name in state.buffers}
    return {name: value for name, value in received.items() if name in state.theta}


def moved(theta: State, change: State) -> State:
    """The model plus a change, in the model's dtypes."""
    return theta | {name: (theta[name] + value).to(theta[name].dtype) for name, value in change.items()}


def trained_change(
    message: Model, site: Site, local: Local, before_step: Callable[[nn.Module], None] | None = None,
    extra: Callable[[nn.Module], Tensor] | None = None,
) -> tuple[State, Dense]:  # fmt: skip
    """Train the model; returns Delta_i of every trained parameter, float32, and the batch-norm statistics.

    `before_step` is called with the model once a batch's gradients are computed. `extra(model)` is added to every
    batch's loss.
    """
    theta = message.theta.dense()
    model = site.model(theta)
    site.fit(model, local, extra=extra, before_step=None if before_step is None else lambda again: before_step(model))
    site.score("personalised", model)
    after, parameters = state_of(model), dict(model.named_parameters(remove_duplicate=False))
    learnt = [name for name, p in parameters.items() if p.requires_grad]
    change = {name: after[name].float() - theta[name].float() for name in learnt}
    return change, Dense({name: value for name, value in after.items() if name not in parameters})


def whole(state: ServerModel, problem: Problem) -> nn.Module:
    """The server's model."""
    return problem.first_model(state.theta | state.buffers)
