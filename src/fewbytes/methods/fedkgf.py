"""Fed-KGF: Li, Shen, Liu, Wang, Ma, Ding, Cao, "Representative Kernels-based CNN for Faster Transmission in Federated
Learning", IEEE Transactions on Mobile Computing 2024.

A convolution learns only b base kernels w and generates its other output channels from copies of them,
w' = sign(w)(|w|^beta + alpha) (Eq. 2), with fixed random alpha and beta that every node draws from one seed. Clients
train base kernels, batch norm and classifier. The model's M modules are divided into G = min(M, n) groups; each of the
n clients of a round uploads one group, by a random permutation. The server assembles the new model from the groups,
without averaging, and sends it to all.

Bytes per client and round, before lossless coding: 4 D down and, on average, 4 D / n up, where D counts the values of
the model with base kernels only (with batch-norm buffers; counters take 8 bytes); with k owners 4 k D / n up, and
4 D if all own every group. Each common value adds 4 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fewbytes.base.errors import MethodError
from fewbytes.base.ranges import PART, Count, Samples, Share, Whole
from fewbytes.base.state import state_of, trained_entries
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import ENTRY_RULES
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.averaging import GlobalModel
from fewbytes.models.builders import convolutional
from fewbytes.models.kgf import Kernels, generated_network
from fewbytes.wire import Dense, payload

T = TypeVar("T")
NORMALISATIONS = (_NormBase, nn.LayerNorm, nn.GroupNorm)


@payload
class Model:
    """Server to client: the model; the clients in the round's permutation, whose g-th client uploads group g; and the
    order in which modules are grouped, by number (None: in order of definition)."""

    theta: Dense
    order: list[int]
    modules: list[int] | None


@payload
class Modules:
    """Client to server: the entries of its group."""

    theta: Annotated[Dense, PART]
    samples: Samples


@dataclass(frozen=True)
class FedKGF(Method):
    """Hyper-parameters of Fed-KGF."""

    fraction: Share = 1.0
    local: Local = Local(epochs=1, lr=0.05, batch=64, momentum=0.9, weight_decay=5e-4, lr_rounds=400)
    base: Count = 16  # b, number of base kernels per convolution
    sign: bool = True  # multiply generated kernels by random signs
    alpha: bool = True  # multiply generated kernels by learned factors
    through: bool = True  # gradients flow to the base kernels through the generated ones, too
    init: Literal["he", "uniform1"] = "he"  # initial base kernels: He's normal, or uniform in [-1, 1]
    owners: Whole = 1  # clients that upload each group, which is averaged; 0: all upload the whole model, as in FedAvg
    groups: Literal["fixed", "random"] = "fixed"  # groups of consecutive modules, or drawn at random each round
    common: bool = False  # all clients also upload normalisations and the classifier, which are averaged

    promises = Promises(sends="one group of its layers' base kernels", aggregates=ENTRY_RULES)

    def model_for(self, shape: tuple[int, ...]) -> str:
        """For images, a model with convolutions."""
        return convolutional(super().model_for(shape), shape)

    def remodel(self, model: nn.Module, seed: int) -> nn.Module:
        """The incomplete network: only base kernels, with alpha and beta from the seed."""
        return generated_network(model, Kernels(self.base, seed, self.sign, self.alpha, self.through, self.init))

    def server(self, problem: Problem) -> GlobalModel:
        return GlobalModel(dict(problem.first_state()))

    def round(self, state: GlobalModel, net: Network, t: int) -> None:
        cohort = net.sample(self.fraction)
        order = [cohort[i] for i in net.rng.permutation(len(cohort))]
        modules = None
        if self.groups == "random":
            modules = net.rng.permutation(len(modules_of(net.problem.first_model()))).tolist()
        mean, send = net.entry_means(state.theta, few=True), Model(Dense(state.theta), order, modules)
        model = net.problem.first_model()

        def check(client: Id, reply: Modules) -> None:
            if reply.theta.state.keys() != self.own(send, client, model):
                raise MethodError("its upload has other entries than those of its group")

        for _, reply in net.call(self.train, to=cohort, send=send, check=check):
            mean.add(reply.theta.dense(), weight=reply.samples)
        state.theta = mean.over(state.theta)

    def train(self, state: None, message: Model, site: Site) -> Modules:
        model = site.model(message.theta.dense())
        site.fit(model, self.local)
        site.score("personalised", model)
        names = self.own(message, site.me, model)
        return Modules(Dense(state_of(model, keep=names.__contains__)), len(site.train))

    def own(self, message: Model, client: Id, model: nn.Module) -> set[str]:
        """The names of the entries that a client uploads."""
        modules = modules_of(model)
        if message.modules is not None:
            modules = [modules[m] for m in message.modules]
        groups = grouped(modules, len(message.order))
        own = owned(message.order.index(client), len(message.order), self.owners)
        names = {name for g in own if g < len(groups) for module in groups[g] for name in module}
        return names | set(common_entries(model) if self.common else ())

    def global_model(self, state: GlobalModel, problem: Problem) -> nn.Module:
        return problem.first_model(state.theta)

    def observed(self, model: nn.Module) -> list[str] | None:
        """The whole model if every client uploads it; otherwise the group changes each round."""
        return None if self.owners else [name for name, p in model.named_parameters() if p.requires_grad]


def modules_of(model: nn.Module) -> list[list[str]]:
    """The modules of section 3.3 in the order of their definition: names of their entries in the model's state.

    A module is a layer with its normalisation. Each layer with entries starts one, except normalisations, which belong
    to the preceding layer, and a shortcut's 1x1 convolution, which belongs to the first layer of its block.
    ResNet-18 has 18 modules, YOLOX-S 83.
    """
    modules: list[list[str]] = []
    first: dict[str, list[str]] = {}  # by block name, its first module
    for name, layer in model.named_modules():
        entries = [f"{name}.{entry}" if name else entry for entry in own_entries(layer)]
        if not entries:
            continue
        block = re.split(r"\.(?:shortcut|downsample)(?:\.|$)", name)
        if len(block) > 1 and block[0] in first:
            first[block[0]] += entries
        elif isinstance(layer, NORMALISATIONS) and modules:
            modules[-1] += entries
        else:
            modules.append(entries)
            parents = name.split(".")
            for i in range(1, len(parents)):
                first.setdefault(".".join(parents[:i]), entries)
    return modules


def own_entries(layer: nn.Module) -> list[str]:
    """Names of the layer's parameters and saved buffers, without those of layers inside it."""
    return [name for name in trained_entries(layer) if "." not in name]


def grouped(modules: Sequence[T], clients: int) -> list[list[T]]:
    """G = min(M, n) groups of consecutive modules; the first M mod G groups have one more than the others."""
    count = min(len(modules), clients)
    sizes = [len(modules) // count + (g < len(modules) % count) for g in range(count)]
    return [list(modules[sum(sizes[:g]) : sum(sizes[: g + 1])]) for g in range(count)]


def owned(slot: int, clients: int, owners: int) -> list[int]:
    """The groups of the client at a slot of the permutation: its own and the next owners - 1 (owners = 0: all)."""
    return [(slot + i) % clients for i in range(min(owners or clients, clients))]


def common_entries(model: nn.Module) -> list[str]:
    """Names of the entries of normalisations, statistics included, and of the output layers: those that the model names
    its `predictors`, else its last module."""
    ends = tuple(f"{name}." for name in getattr(model, "predictors", ()))
    last = [name for name in trained_entries(model) if name.startswith(ends)] if ends else modules_of(model)[-1]
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, NORMALISATIONS)}
    return [*last, *(f"{name}.{entry}" for name, layer in layers.items() for entry in own_entries(layer))]
