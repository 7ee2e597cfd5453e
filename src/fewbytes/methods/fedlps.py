"""FedLPS: Jia, Zhang, Beheshti, Dou, "FedLPS: Heterogeneous Federated Learning for Multiple Tasks with Local Parameter
Sharing", AAAI 2024.

The first layers, the encoder, are trained only in the first round. After its first local training every client prunes
the other layers permanently: the channels with the smallest L1 norm, as outputs, as inputs and in batch normalisation.
It sends the remaining values; the server averages the pruned models, weighted by numbers of samples.

Bytes per client and round, before lossless coding: 4 D down and 4 n + P/8 up, for n remaining of P values outside
the encoder (in the first round P = D, and the encoder's remain).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from fewbytes.base.errors import MethodError, UserError
from fewbytes.base.ranges import PART, BelowOne, Samples, Share
from fewbytes.base.state import State, state_of, trained_entries
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import VECTOR_RULES
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.averaging import first_shared
from fewbytes.models.build import batch_norm_names
from fewbytes.models.layers import hidden_layers, layers_of
from fewbytes.wire import Dense, Masked, payload

RATIOS = (0.0, 0.2, 0.4, 0.6, 0.8)  # of clients by id, if they differ


@payload
class Download:
    """Server to client: Theta, and whether its encoder is already trained."""

    theta: Dense
    settled: bool


@payload
class Pruned:
    """Client to server: its pruned model, with the encoder until it is settled, and n_i."""

    theta: Annotated[Masked, PART]
    samples: Samples


@dataclass
class Settling:
    """The server's state."""

    theta: State  # Theta
    settled: bool = False  # whether its encoder is trained


@dataclass
class Sparse:
    """A client's state."""

    theta: State  # its model; empty before its first training
    mask: State = field(default_factory=dict)  # of the pruned entries


@dataclass(frozen=True)
class FedLPS(Method):
    """Hyper-parameters of FedLPS; local training's are GENE-FL's."""

    fraction: Share = 1.0
    local: Local = Local(epochs=10, lr=0.01, batch=64, momentum=0.9)
    ratio: BelowOne = 0.8  # p, the fraction of channels that is pruned
    ratios: Literal["equal", "adaptive"] = "equal"  # adaptive: 0, 0.2, 0.4, 0.6, 0.8, repeated over clients

    promises = Promises(
        sends="the remaining values of a pruned model", headline="personalised", aggregates=VECTOR_RULES
    )

    def server(self, problem: Problem) -> Settling:
        model = problem.first_model()
        prune_mask(model, self.ratio, encoder_names(model))  # refuse a model without layers before the run starts
        return Settling(first_shared(problem, trained_entries(model)).theta)

    def client(self, site: Site) -> Sparse:
        return Sparse({})

    def round(self, state: Settling, net: Network, t: int) -> None:
        means = net.entry_means(state.theta)
        send, model = Download(Dense(state.theta), state.settled), net.problem.first_model()
        left = {ratio: self.left(model, ratio, state.settled) for ratio in {self.ratio_of(i) for i in net.clients}}

        def check(client: Id, reply: Pruned) -> None:
            if {name: int(m.count_nonzero()) for name, m in reply.theta.mask.items()} != left[self.ratio_of(client)]:
                raise MethodError("its upload is not what pruning keeps of its model")

        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=send, check=check):
            means.add(reply.theta.dense(), weight=reply.samples)
        state.theta, state.settled = means.over(state.theta), True

    def train(self, state: Sparse, message: Download, site: Site) -> Pruned:
        theta = message.theta.dense()
        theta = theta | {name: theta[name] * kept for name, kept in state.mask.items()}
        model = site.model(state.theta | theta)
        site.score("combined", model)
        encoder = encoder_names(model)
        parameters = dict(model.named_parameters())
        if message.settled:
            for name in encoder & parameters.keys():
                parameters[name].requires_grad_(False)
        pruned = [(parameters[name], kept.to(site.device)) for name, kept in state.mask.items()]

        def keep_zeros(again: Callable[[], Tensor]) -> None:
            for p, kept in pruned:
                if p.grad is not None:
                    p.grad.mul_(kept)

        site.fit(model, self.local, before_step=keep_zeros)
        after = state_of(model)
        if message.settled:
            after |= {name: theta[name] for name in encoder}  # with its statistics
        if not state.mask:
            state.mask = prune_mask(model, self.ratio_of(site.me), encoder)
        state.theta = after | {name: after[name] * kept for name, kept in state.mask.items()}
        site.score("cohort", site.model(state.theta))
        sent = {name: value for name, value in state.theta.items() if name not in encoder or not message.settled}
        full = {name: torch.ones(value.shape, dtype=torch.bool) for name, value in sent.items()}
        return Pruned(Masked.of(sent, full | state.mask), len(site.train))

    def ratio_of(self, client: Id) -> float:
        """The fraction of channels that a client prunes."""
        return RATIOS[client % len(RATIOS)] if self.ratios == "adaptive" else self.ratio

    def left(self, model: nn.Module, ratio: float, settled: bool) -> dict[str, int]:
        """The number of values that a client sends per entry, whichever channels it prunes."""
        encoder = encoder_names(model)
        sizes = {name: value.numel() for name, value in trained_entries(model).items()}
        sizes |= {name: int(m.count_nonzero()) for name, m in prune_mask(model, ratio, encoder).items()}
        return {name: size for name, size in sizes.items() if name not in encoder or not settled}

    def global_model(self, state: Settling, problem: Problem) -> nn.Module:
        return problem.first_model(state.theta)

    def local_model(self, state: Sparse, site: Site) -> nn.Module | None:
        return site.model(state.theta) if state.theta else None


def encoder_names(model: nn.Module) -> set[str]:
    """The entries before the first layer whose width differs from the first layer's."""
    layers, hidden = layers_of(model), hidden_layers(model)
    modules = dict(model.named_modules())
    width = modules[hidden[0]].weight.shape[0] if hidden else 0
    later = next((i for i, layer in enumerate(hidden) if modules[layer].weight.shape[0] != width), 1)
    first = layers[hidden[later]][0] if later < len(hidden) else layers[list(layers)[-1]][0]
    names = list(trained_entries(model))
    return set(names[: names.index(first)])


def prune_mask(model: nn.Module, ratio: float, encoder: set[str]) -> State:
    """Masks of the kept values by entry: those of the channels with the largest L1 norms, as outputs and as inputs.

    Channels are selected once per width, by the norms of all weights that write or read this many channels. So a layer
    keeps the same channels as its batch normalisation, the layers it is added to and those that read it. The encoder
    keeps all of its own, and the classifier all outputs.
    """
    own, batch_norm, layers = trained_entries(model), batch_norm_names(model), layers_of(model)
    modules, last = dict(model.named_modules()), list(layers)[-1]
    widths, pruned, norms = list[int](), dict[str, tuple[int, int, int]](), dict[int, Tensor]()
    for layer, (weight, *_) in layers.items():
        if not weight.endswith("weight"):
            raise UserError(
                f"FedLPS prunes weights, and those of {layer} are frozen: train them, or also freeze its bias"
            )
        value = own[weight].detach().abs().cpu().float()
        outputs, inputs = value.shape[:2]
        if weight not in encoder:
            read = channels_read(inputs, widths) if getattr(modules[layer], "groups", 1) == 1 else 0
            pruned[layer] = 0 if layer == last else outputs, read, inputs
            if layer != last:
                norms[outputs] = norms.get(outputs, torch.zeros(outputs)) + value.flatten(1).sum(1)
            if read:
                norms[read] = norms.get(read, torch.zeros(read)) + value.transpose(0, 1).reshape(read, -1).sum(1)
        widths.append(outputs)
    kept, mask = {width: largest(of, ratio) for width, of in norms.items()}, State()
    for layer, (outputs, read, inputs) in pruned.items():
        weight, *biases = layers[layer]
        shape = own[weight].shape
        rows = kept[outputs] if outputs else torch.ones(shape[0], dtype=torch.bool)
        columns = kept[read].repeat_interleave(inputs // read) if read else torch.ones(inputs, dtype=torch.bool)
        mask[weight] = (rows[:, None] & columns).view(*shape[:2], *[1] * (len(shape) - 2)).expand(shape).contiguous()
        mask |= {bias: rows for bias in biases if outputs}
    for name, value in own.items():
        if name in batch_norm and name not in encoder and len(value) in kept:
            mask[name] = kept[len(value)]
    return mask


def channels_read(inputs: int, widths: Sequence[int]) -> int:
    """The number of channels among a layer's `inputs`, given the `widths` of the layers before it: `inputs` if one has
    this width; else the width of the last layer that divides it, each channel being several inputs (flattened)."""
    if inputs in widths:
        return inputs
    return next((width for width in reversed(widths) if inputs % width == 0), inputs)


def largest(norms: Tensor, ratio: float) -> Tensor:
    """True at all but the floor(ratio n) smallest norms (n,); ties by position."""
    kept = torch.ones(len(norms), dtype=torch.bool)
    kept[norms.argsort(stable=True)[: int(ratio * len(norms))]] = False
    return kept
