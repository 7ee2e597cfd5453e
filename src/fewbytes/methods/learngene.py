"""Learngene: Wang, Geng, Lin, Xia, Qi, Xu, "Learngene: From Open-World to Your Learning Task", AAAI 2022; as GENE-FL
applies it to federated clients (FEDLG).

Only a few layers, the learnGene, are worth inheriting, and only they are sent. As PartialFed, with other layers: the
two last square convolutions of the smallest and of the largest width, as inferred from GENE-FL's figures; or, as in the
original, the four convolutions whose values changed least in the first rounds.

Bytes per client and round, before lossless coding: 4 A down and 4 A up, where A counts the values of those
convolutions (with select=updates, of all convolutions in the first rounds).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from fewbytes.base.ranges import Count, Share
from fewbytes.base.state import State
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import averaging
from fewbytes.methods.parts.averaging import Model, Own, Trained
from fewbytes.models.layers import hidden_layers, layers_of, square_layers
from fewbytes.wire import Dense

GENES = 4  # layers of the learnGene


@dataclass
class Moving(averaging.GlobalModel):
    """The server's state; `moved` is |accumulated update| of each layer's values, on average."""

    moved: dict[str, float] = field(default_factory=dict)
    picked: bool = False  # whether the layers that changed least are selected


@dataclass(frozen=True)
class Learngene(Method):
    """Hyper-parameters of Learngene; local training's are GENE-FL's."""

    fraction: Share = 1.0
    local: Local = Local(epochs=10, lr=0.01, batch=64, momentum=0.9)
    select: Literal["fixed", "updates"] = "fixed"  # updates: the layers with the smallest updates
    select_rounds: Count = 10  # number of rounds before they are selected

    promises = Promises(sends="a fixed part of its layers", headline="personalised", aggregates=EVERY_RULE, sums=True)

    def server(self, problem: Problem) -> Moving:
        return Moving(averaging.first_shared(problem, self.shared(problem.first_model())).theta)

    def shared(self, model: nn.Module) -> list[str]:
        """Names of the entries that are sent at first."""
        if self.select == "updates":
            chosen = hidden_layers(model)
        else:
            square = list(square_layers(model).values())
            chosen = [*square[0][-2:], *square[-1][-2:]]
        return [name for layer, names in layers_of(model).items() if layer in chosen for name in names]

    def client(self, site: Site) -> Own:
        return Own({})

    def round(self, state: Moving, net: Network, t: int) -> None:
        before = state.theta
        replies = net.call(self.train, to=net.sample(self.fraction), send=Model(Dense(before)))
        state.theta = averaging.means_over(before, replies, net)
        if self.select == "updates" and not state.picked:
            layers = layers_of(net.problem.first_model())
            for layer, change in changes(before, state.theta, layers).items():
                state.moved[layer] = state.moved.get(layer, 0.0) + change
            if t >= self.select_rounds:
                state.picked = True
                still = sorted(state.moved, key=lambda layer: state.moved[layer])[:GENES]
                kept = {name for layer in still for name in layers[layer]}
                state.theta = {name: value for name, value in state.theta.items() if name in kept}

    def train(self, state: Own, message: Model, site: Site) -> Trained:
        return averaging.train_shared(state, message, site, self.local)

    def global_model(self, state: Moving, problem: Problem) -> nn.Module | None:
        return averaging.whole_model(state, problem)

    def local_model(self, state: Own, site: Site) -> nn.Module | None:
        return averaging.own_model(state, site)

    def observed(self, model: nn.Module) -> list[str]:
        return averaging.parameters_among(model, self.shared(model))


def changes(old: State, new: State, layers: dict[str, list[str]]) -> dict[str, float]:
    """The mean |new - old| of values by layer."""
    found = {}
    for layer, names in layers.items():
        there = [name for name in names if name in old]
        if there:
            total = sum(float((new[name] - old[name]).abs().sum()) for name in there)
            found[layer] = total / sum(old[name].numel() for name in there)
    return found
