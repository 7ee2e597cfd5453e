"""FedPM: Isik, Pase, Gunduz, Weissman, Zorzi, "Sparse Random Networks for Communication-Efficient Federated Learning",
ICLR 2023, Algorithms 1 and 2, with the prior reset every round.

Weights never change: each is +c or -c, drawn once, the same at every node. Clients learn which ones to keep: scores s
with a mask m ~ Bernoulli(sigmoid(s)), drawn for every batch; gradients pass through the draw as if it were sigmoid(s).
After training a client draws one mask and sends it. From the masks of K clients the server computes the mode of a Beta
distribution, theta = (a - 1) / (a + b - 2) with a = 1 + sum m, b = 1 + sum (1 - m); clients continue from
s = log(theta / (1 - theta)), theta clipped to [0.01, 0.99].

The masked weights are the trained ones of Linear and Conv2d layers; c is Kaiming's deviation, sqrt(2 / fan-in). Batch
normalisation has weight 1 and bias 0, and its statistics are averaged. Every other parameter, including biases, keeps
its initial value.

Bytes per client and round, before lossless coding: 4 (d + s) down, d/8 + 4 s up, for d masked weights and s batch-norm
statistics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import EXACT, LEARNT, SENT, STATISTICS, Share
from fewbytes.base.state import State, load_state, state_of
from fewbytes.base.streams import seeded
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.models import batch_norm_names
from fewbytes.wire import Bits, Dense, payload

CLIP = 0.01  # minimum distance of a client's initial probabilities from 0 and 1


@payload
class Theta:
    """Server to client: the probability of each masked weight, and buffers."""

    theta: Dense


@payload
class Drawn:
    """Client to server: a mask drawn from its probabilities, and its batch-norm statistics."""

    mask: Annotated[Bits, SENT, LEARNT]
    buffers: Annotated[Dense, SENT, STATISTICS, EXACT]


@dataclass
class MaskProbabilities:
    """The server's state."""

    theta: State  # the probability of each masked weight
    buffers: State  # batch-norm statistics


@dataclass(frozen=True)
class FedPM(Method):
    """Hyper-parameters of FedPM; lr and batch are ours."""

    scored: Literal["sampled", "threshold"] = "threshold"  # mask of the global model: sampled, or theta > 0.5
    fraction: Share = 1.0
    local: Local = Local(epochs=3, lr=0.1, batch=20, optimiser="adam")  # training of the scores

    promises = Promises(
        sends="one bit per weight: whether to keep this weight of a random network", aggregates=EVERY_RULE
    )

    def server(self, problem: Problem) -> MaskProbabilities:
        model = problem.first_model()
        names = masked_names(model)
        if not names:
            raise UserError("fedpm masks the weights of Linear and Conv2d layers, and this model learns none")
        learnt = dict(model.named_parameters(remove_duplicate=False))
        return MaskProbabilities(
            {name: torch.full_like(problem.first_state()[name], 0.5) for name in names},
            {name: value for name, value in problem.first_state().items() if name not in learnt},
        )

    def round(self, state: MaskProbabilities, net: Network, t: int) -> None:
        sent = state.theta | state.buffers
        mean = net.mean(sent)
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=Theta(Dense(sent))):
            mean.add(reply.mask.dense() | reply.buffers.dense())
        after = mean()  # the mean of masks is the mode (a - 1) / (a + b - 2)
        state.theta = {name: after[name] for name in state.theta}
        state.buffers = {name: after[name] for name in state.buffers}

    def train(self, state: None, message: Theta, site: Site) -> Drawn:
        received = message.theta.dense()
        model = site.model()
        names = masked_names(model)
        buffers = {name: value for name, value in received.items() if name not in names}
        weights = frozen_weights(model)
        load_state(model, weights | buffers)
        network = Stochastic(model, {name: received[name] for name in names})
        site.fit(network, self.local)
        mask = {name: drawn(score.detach().sigmoid()).cpu() for name, score in zip(names, network.scores, strict=True)}
        load_state(model, {name: weights[name] * mask[name] for name in names})
        site.score("personalised", model)
        return Drawn(Bits(mask), Dense(state_of(model, keep=buffers.__contains__)))

    def global_model(self, state: MaskProbabilities, problem: Problem) -> nn.Module:
        model = problem.first_model(state.buffers)
        weights = frozen_weights(model)
        with seeded(problem.seed, "fedpm mask"):
            masks = {name: p > 0.5 if self.scored == "threshold" else drawn(p) for name, p in state.theta.items()}
        load_state(model, weights | {name: weights[name] * mask for name, mask in masks.items()})
        return model

    def observed(self, model: nn.Module) -> None:
        """None: the upload is a random mask, not a change of parameters."""


class Stochastic(nn.Module):
    """A network whose weights are frozen and kept with probability sigmoid(scores), drawn in each forward pass."""

    def __init__(self, network: nn.Module, theta: State) -> None:
        super().__init__()
        weights = dict(network.named_parameters())
        self.network, self.names = network.requires_grad_(False), list(theta)
        if hasattr(network, "loss"):
            self.loss = network.loss
        self.scores = nn.ParameterList(torch.empty_like(weights[name]).copy_(scores(p)) for name, p in theta.items())

    def forward(self, x: Tensor) -> Any:
        weights = dict(self.network.named_parameters())
        kept = {}
        for name, score in zip(self.names, self.scores, strict=True):
            p = score.sigmoid()
            kept[weights[name]] = weights[name] * (p + (drawn(p).to(p.dtype) - p).detach())
        used = {
            f"{layer}.{name}" if layer else name: kept[p]
            for layer, module in self.network.named_modules()
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if p in kept
        }
        return functional_call(self.network, used, (x,), tie_weights=False)  # shared layers would be restored wrongly


def masked_names(model: nn.Module) -> list[str]:
    """Names of the trained weights of Linear and Conv2d layers."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    own = {f"{name}.weight" if name else "weight" for name in layers}
    return [name for name, p in model.named_parameters() if name in own and p.requires_grad]


def frozen_weights(model: nn.Module) -> State:
    """The frozen values for initial weights w: c sign(w) for masked weights, neutral batch normalisation."""
    first, frozen = state_of(model), {}
    for name in masked_names(model):
        c = math.sqrt(2 / first[name][0].numel())
        frozen[name] = torch.where(first[name] < 0, -c, c)
    for name in batch_norm_names(model) & first.keys():
        frozen[name] = torch.full_like(first[name], float(name.endswith("weight")))
    return frozen


def drawn(p: Tensor) -> Tensor:
    """True with probability p, elementwise."""
    return torch.rand_like(p) < p


def scores(theta: Tensor) -> Tensor:
    """Scores s of the probabilities theta."""
    return theta.clamp(CLIP, 1 - CLIP).logit()
