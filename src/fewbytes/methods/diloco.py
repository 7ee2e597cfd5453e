"""DiLoCo: Douillard, Feng, Rusu, Chhaparia, Donchev, Kuncoro, Ranzato, Szlam, Shen, "DiLoCo: Distributed
Low-Communication Training of Language Models", 2023, arXiv 2311.08105, Algorithm 1. With `fragments`, it is
Streaming DiLoCo, without the overlap: Douillard, Donchev, Rush, Kale, Charles, Garrett, Teston, Lacey, McIlroy, Shen,
Ramé, Szlam, Ranzato, Barham, "Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch",
2025, arXiv 2501.18512.

Clients take H steps of AdamW from the server's model theta, and keep its moments from round to round. The server takes
their mean change as a gradient of SGD with Nesterov momentum: (1) D = sum_k (n_k / n) theta_k - theta; (2) v <- beta v
+ D; (3) theta <- theta + eta (D + beta v). With P fragments, a round is of every P-th layer, in turn: clients send only
these, (1) to (3) apply to these, and with its next request a client takes these from the server. Its other layers stay
its own.

Bytes per client and round, before lossless coding: 4 D down, 4 D_p up, where D counts the model's values and D_p those
of the round's fragment (with one fragment, all D). Rounded messages hardly pay for layers that have not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Self

from torch import nn

from fewbytes.base.errors import MethodError, UserError
from fewbytes.base.ranges import PART, BelowOne, Count, Positive, Samples, Share
from fewbytes.base.state import State, state_of, trained_entries
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.averaging import (
    Model,
    MovingModel,
    first_shared,
    learnt,
    mean_change,
    outer_step,
    parameters_among,
)
from fewbytes.wire import Dense, payload


@payload
class Fragment:
    """Client to server: the entries of the round's fragment after training, and the number of training samples."""

    theta: Annotated[Dense, PART]
    samples: Samples


@dataclass
class Replica:
    """A client's state."""

    memory: State  # AdamW's moments; empty before its first training
    theta: State  # its own model, and the server's as last received: empty if there is one fragment
    received: State
    round: int = 0  # of its last training


@dataclass(frozen=True)
class DiLoCo(Method):
    """Hyper-parameters of DiLoCo; the paper's, except the batch (512 there)."""

    fraction: Share = 1.0
    local: Local = Local(steps=500, lr=4e-4, batch=32, optimiser="adamw", weight_decay=0.1)  # H, the inner optimiser
    server_lr: Positive = 0.7  # eta
    server_momentum: BelowOne = 0.9  # beta
    fragments: Count = 1  # P, parts of the model that are sent in turn

    promises = Promises(
        sends="its whole model, or one fragment of it in turn", aggregates=EVERY_RULE, protects={"clients"}, sums=True
    )

    def quick(self, epochs: int) -> Self:
        return replace(self, local=replace(self.local, epochs=epochs, steps=0))

    def server(self, problem: Problem) -> MovingModel:
        theta = first_shared(problem, trained_entries(problem.first_model())).theta
        fragments_of(theta, self.fragments)  # raises for too many
        return MovingModel(theta, {})

    def client(self, site: Site) -> Replica:
        return Replica({}, {}, {})

    def round(self, state: MovingModel, net: Network, t: int) -> None:
        names = in_turn(state.theta, self.fragments, t)
        mean = net.mean({name: state.theta[name] for name in names})
        send, to = Model(Dense(state.theta)), net.sample(self.fraction)
        for _, reply in net.call(self.train, to=to, send=send, check=of_these(names)):
            mean.add(reply.theta.dense(), weight=reply.samples)
        found = mean()
        change = mean_change(state.theta, found, learnt(net.problem, found))  # (1)
        moved, v = outer_step(state.theta, change, state.velocity, self.server_lr, self.server_momentum, nesterov=True)
        state.theta, state.velocity = state.theta | found | moved, state.velocity | v

    def train(self, state: Replica, message: Model, site: Site) -> Fragment:
        theta = message.theta.dense()
        names = in_turn(theta, self.fragments, site.round)
        renewed = in_turn(theta, self.fragments, site.round - 1)
        here = state.theta and state.round == site.round - 1  # else it missed fragments, and takes all
        model = site.model(joined(state.theta, state.received, theta, renewed) if here else theta)
        site.fit(model, self.local, memory=state.memory)
        site.score("personalised", model)
        trained = state_of(model)
        if self.fragments > 1:
            state.theta, state.received, state.round = trained, theta, site.round
        return Fragment(Dense({name: trained[name] for name in names}), len(site.train))

    def global_model(self, state: MovingModel, problem: Problem) -> nn.Module:
        return problem.first_model(state.theta)

    def observed(self, model: nn.Module) -> list[str]:
        return parameters_among(model, trained_entries(model))


def layer_of(name: str) -> str:
    """An entry's layer: the outermost numbered block that contains it, such as `h.3`, else its module."""
    parts = name.split(".")
    block = next((i for i, part in enumerate(parts[:-1]) if part.isdecimal()), len(parts) - 2)
    return ".".join(parts[: block + 1])


def fragments_of(names: Iterable[str], p: int) -> list[list[str]]:
    """Every p-th layer's entries, from the first, the second, … on. Raises UserError for fewer than p layers."""
    names = list(names)
    layers = list(dict.fromkeys(map(layer_of, names)))
    if len(layers) < p:
        raise UserError(f"fragments={p}: the model has only {len(layers)} layers to send in turn")
    number = {layer: i % p for i, layer in enumerate(layers)}
    return [[name for name in names if number[layer_of(name)] == i] for i in range(p)]


def in_turn(names: Iterable[str], p: int, t: int) -> list[str]:
    """The entries of the fragment that is sent in round t."""
    return fragments_of(names, p)[(t - 1) % p]


def joined(own: State, before: State, now: State, renewed: Iterable[str]) -> State:
    """A client's model at its next request: the server's values of the `renewed` fragment, else its own. What a run's
    rounding of messages has corrected since the message `before` is added to these."""
    corrected = {
        name: value + (now[name] - before[name]) if value.is_floating_point() else value for name, value in own.items()
    }
    return corrected | {name: now[name] for name in renewed}


def of_these(names: Iterable[str]) -> Callable[[Id, Fragment], None]:
    """Raises MethodError for a reply of other entries."""
    wanted = set(names)

    def check(client: Id, reply: Fragment) -> None:
        if reply.theta.state.keys() != wanted:
            raise MethodError("its reply is not of this round's fragment")

    return check
