"""Learngene: Wang, Geng, Lin, Xia, Qi, Xu, "Learngene: From Open-World to Your Learning Task", AAAI 2022; as GENE-FL
carries it over to federated clients (FEDLG).

A few layers, the learnGene, hold what is worth inheriting; only they travel. As PartialFed, with another part: the two
last square convolutions of the smallest and of the largest width, which is what GENE-FL's figures give away; or, as the
original picks them, the four convolutions whose values moved least in the first rounds. With clusters=4 and
fraction=0.2 it runs inside clusters (`clustered`), as GENE-FL runs it.

Bytes per client, before lossless coding: in a round 4 A down and 4 A up, where A counts the values of those
convolutions (with select=updates, of all convolutions in the first rounds); a newcomer gets 4 A once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import nn

from fewbytes.base.state import State
from fewbytes.core.network import Network
from fewbytes.core.problem import Task
from fewbytes.core.ranges import Count, Share
from fewbytes.methods.clustered import Clustered, Clusters
from fewbytes.models.layers import hidden_layers, layers_of, square_layers

GENES = 4  # layers of the learnGene


@dataclass
class Moving(Clusters):
    """The server's state; `moved` is |accumulated update| of each layer's values, on average, summed over clusters."""

    moved: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Learngene(Clustered):
    """Hyper-parameters of Learngene."""

    clusters: Count = 1
    fraction: Share = 1.0
    select: Literal["fixed", "updates"] = "fixed"  # updates: the layers that moved least
    select_rounds: Count = 10  # after which they are picked

    headline: ClassVar[str] = "personalised"

    def server(self, task: Task) -> Moving:
        return Moving(super().server(task).models)

    def shared(self, model: nn.Module) -> list[str]:
        if self.select == "updates":
            chosen = hidden_layers(model)
        else:
            square = list(square_layers(model).values())
            chosen = [*square[0][-2:], *square[-1][-2:]]
        return [name for layer, names in layers_of(model).items() if layer in chosen for name in names]

    def round(self, state: Moving, net: Network, t: int) -> None:
        before = list(state.models)
        super().round(state, net, t)
        if self.select == "updates" and t <= self.select_rounds:
            layers = layers_of(net.task.first_model())
            for old, new in zip(before, state.models, strict=True):
                for layer, change in changes(old, new, layers).items():
                    state.moved[layer] = state.moved.get(layer, 0.0) + change
            if t == self.select_rounds:
                still = sorted(state.moved, key=lambda layer: state.moved[layer])[:GENES]
                kept = {name for layer in still for name in layers[layer]}
                state.models = [{n: value for n, value in model.items() if n in kept} for model in state.models]


def changes(old: State, new: State, layers: dict[str, list[str]]) -> dict[str, float]:
    """By layer the mean |new - old| of its values."""
    found = {}
    for layer, names in layers.items():
        there = [name for name in names if name in old]
        if there:
            total = sum(float((new[name] - old[name]).abs().sum()) for name in there)
            found[layer] = total / sum(old[name].numel() for name in there)
    return found
