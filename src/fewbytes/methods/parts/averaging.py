"""Models, or parts of them, that are averaged: what travels, what each half keeps, local training of a part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Unpack

from torch import nn

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import MODEL, SENT, Samples
from fewbytes.base.state import State, state_of, trained_entries
from fewbytes.core.network import Network
from fewbytes.core.problem import Id, Problem
from fewbytes.core.site import Site
from fewbytes.core.training import Hooks, Local
from fewbytes.wire.dense import Dense
from fewbytes.wire.schema import payload


@payload
class Model:
    """Server to client: what is shared of the model."""

    theta: Annotated[Dense, MODEL]


@payload
class Trained:
    """Client to server: what it was sent, trained, and on how many samples."""

    theta: Annotated[Dense, SENT]
    samples: Samples


@dataclass
class GlobalModel:
    """The server's state."""

    theta: State  # what is shared of the model


@dataclass
class Own:
    """A client's state."""

    theta: State  # what it keeps of its model; empty before it trains for the first time


def first_shared(problem: Problem, names: Iterable[str]) -> GlobalModel:
    """The first weights of the entries of these names. Raises UserError if clients have different models."""
    if len(list(problem.architectures())) > 1:
        raise UserError("models are averaged, so all clients need the same one; fedktl and fedproto do not")
    wanted = set(names)
    return GlobalModel({name: value.clone() for name, value in problem.first_state().items() if name in wanted})


def means_over(old: State, replies: Iterable[tuple[Id, Trained]], net: Network) -> State:
    """The mean of each entry over the clients that sent it, by their numbers of samples; `old` where nobody did."""
    means = net.entry_means(old)
    for _, reply in replies:
        means.add(reply.theta.dense(), weight=reply.samples)
    return means.over(old)


def train_whole(message: Model, site: Site, local: Local, **hooks: Unpack[Hooks]) -> Trained:
    """Train the whole model as it comes, score it as `personalised` and send it back."""
    model = site.model(message.theta.dense())
    site.fit(model, local, **hooks)
    site.score("personalised", model)
    return Trained(Dense(state_of(model)), len(site.train))


def train_shared(state: Own, message: Model, site: Site, local: Local) -> Trained:
    """Train what comes with what the client has of its own, keep all of it, and send back what came.

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
    """Names of the entries that travel and are parameters; of one that layers share, each of its names."""
    return [name for name, value in trained_entries(model).items() if isinstance(value, nn.Parameter)]


def parameters_among(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of the names that are of parameters that require gradients, in the model's order."""
    wanted = set(names)
    return [name for name, p in model.named_parameters() if name in wanted and p.requires_grad]
