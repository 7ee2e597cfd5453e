"""Averaging of models or of some entries: messages, the states of server and client, local training, and a step that
the server takes with the mean change as a gradient (the outer step)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Unpack

from torch import nn

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import MODEL, SENT, Samples
from fewbytes.base.state import State, state_of, trained_entries, zeros_for_sums
from fewbytes.core.network import Network
from fewbytes.core.problem import Id, Problem
from fewbytes.core.site import Site
from fewbytes.core.training import Hooks, Local
from fewbytes.wire.dense import Dense
from fewbytes.wire.schema import payload


@payload
class Model:
    """Server to client: the shared entries of the model."""

    theta: Annotated[Dense, MODEL]


@payload
class Trained:
    """Client to server: the received entries after training, and the number of training samples."""

    theta: Annotated[Dense, SENT]
    samples: Samples


@dataclass
class GlobalModel:
    """The server's state."""

    theta: State  # the shared entries of the model


@dataclass
class MovingModel(GlobalModel):
    """The server's state, if its step has momentum."""

    velocity: State  # v, of the parameters; empty, which means 0, before its first step


@dataclass
class Own:
    """A client's state."""

    theta: State  # the entries that it keeps; empty before its first training


def first_shared(problem: Problem, names: Iterable[str]) -> GlobalModel:
    """The initial values of the named entries. Raises UserError if clients have different models."""
    if len(list(problem.architectures())) > 1:
        raise UserError("models are averaged, so all clients need the same one; fedktl and fedproto do not")
    wanted = set(names)
    return GlobalModel({name: value.clone() for name, value in problem.first_state().items() if name in wanted})


def means_over(old: State, replies: Iterable[tuple[Id, Trained]], net: Network) -> State:
    """The mean of each entry over the clients that sent it, weighted by samples; `old` for entries that none sent."""
    means = net.entry_means(old)
    for _, reply in replies:
        means.add(reply.theta.dense(), weight=reply.samples)
    return means.over(old)


def train_whole(message: Model, site: Site, local: Local, **hooks: Unpack[Hooks]) -> Trained:
    """Train the received model, score it as `personalised` and send it back."""
    model = site.model(message.theta.dense())
    site.fit(model, local, **hooks)
    site.score("personalised", model)
    return Trained(Dense(state_of(model)), len(site.train))


def train_shared(state: Own, message: Model, site: Site, local: Local) -> Trained:
    """Train the received entries with the client's own, keep all, and send back the received ones.

    The model before training is scored as `combined`, after it as `cohort`.
    """
    received = message.theta.dense()
    model = site.model(state.theta | received)
    site.score("combined", model)
    site.fit(model, local)
    site.score("cohort", model)
    state.theta = state_of(model)
    return Trained(Dense({name: state.theta[name] for name in received}), len(site.train))


def whole_model(state: GlobalModel, problem: Problem) -> nn.Module | None:
    """The server's model, if all of it is shared."""
    model = problem.first_model(state.theta)
    return model if state.theta.keys() == trained_entries(model).keys() else None


def own_model(state: Own, site: Site) -> nn.Module | None:
    """The client's model, once it has trained one."""
    return site.model(state.theta) if state.theta else None


def learnt_entries(model: nn.Module) -> list[str]:
    """Names of the sent entries that are parameters; a parameter that layers share is listed with each name."""
    return [name for name, value in trained_entries(model).items() if isinstance(value, nn.Parameter)]


def parameters_among(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of the names whose parameters require gradients, in the model's order."""
    wanted = set(names)
    return [name for name, p in model.named_parameters() if name in wanted and p.requires_grad]


def learnt(problem: Problem, names: Iterable[str]) -> list[str]:
    """Those of the model's entries that are parameters; the others, such as batch-norm statistics, take no step."""
    statistics = problem.statistics(0)
    return [name for name in names if name not in statistics]


def mean_change(x: State, mean: State, names: Iterable[str]) -> State:
    """D = mean - x of the named entries, at least in float32: minus the pseudo-gradient."""
    return {name: mean[name] - x[name].to(zeros_for_sums(x[name]).dtype) for name in names}


def outer_step(
    x: State, change: State, velocity: State, lr: float, momentum: float, nesterov: bool
) -> tuple[State, State]:
    """A step of SGD with momentum from x: the entries of `change` moved, and their new velocities.

    v <- momentum v + D; x <- x + lr v or, by Nesterov, x + lr (D + momentum v).
    """
    v = {name: momentum * velocity[name] + d if name in velocity else d for name, d in change.items()}
    direction = {name: d + momentum * v[name] for name, d in change.items()} if nesterov else v
    return {name: (x[name] + lr * step).to(x[name].dtype) for name, step in direction.items()}, v
