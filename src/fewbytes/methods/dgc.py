"""DGC: Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
Training", ICLR 2018, Algorithm 4, with a client's change of a round in the place of a gradient.

Every client keeps of each tensor a momentum u and what it has not sent yet, v. Local training (without momentum) that
changed the model by g gives u <- m u + g, v <- v + u; the client sends the part `density` of v that is largest in
magnitude, and there sets u and v to zero (momentum factor masking). g may first be clipped. Biases and other vectors
are sent whole, as their u. The server moves by the plain mean of what comes; batch-norm statistics are averaged as they
are.

Bytes per client and round, before lossless coding: 4 D down; 7 (k + b) + 4 s up (a value and 24 bits for its index),
where the model's D values are s batch-norm statistics, b of vectors and d others; k = density d, rounded up in each
tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbytes.base.state import State
from fewbytes.core.ranges import BelowOne, NotNegative, Share, Whole
from fewbytes.core.site import Site
from fewbytes.core.training import annealed
from fewbytes.methods.fedavg import Model
from fewbytes.methods.parts.compressed import Compressed
from fewbytes.wire import Dense, TopK, payload
from fewbytes.wire.topk import largest


@payload
class Sparse:
    """Client to server: the largest values of v, the vectors' u, and the batch-norm statistics."""

    change: TopK
    buffers: Dense


@dataclass
class Memory:
    """A client's state."""

    u: State  # momentum
    v: State  # what has not been sent, of all tensors but vectors


@dataclass(frozen=True)
class DGC(Compressed):
    """Hyper-parameters of DGC."""

    density: Share = 1 / 32  # part of each tensor's values that is sent; the paper's is 0.001
    warmup: Whole = 0  # rounds until it is: density^(t / (warmup + 1)) in round t before; the paper has 4
    momentum: BelowOne = 0.9  # m
    clip: NotNegative = 0.0  # norm to which the sum of a round's gradients is clipped, times sqrt(n); 0: it is not

    def client(self, site: Site) -> Memory:
        return Memory({}, {})

    def train(self, state: Memory, message: Model, site: Site) -> Sparse:
        g, buffers = self.fitted(message, site, momentum=0.0)
        if self.clip:
            clients = self.fraction * len(site.task.clients)
            g = clipped(g, self.clip * annealed(self.lr, site.round, self.lr_rounds) / math.sqrt(clients))
        density = self.density ** (min(site.round, self.warmup + 1) / (self.warmup + 1))
        sent, places = {}, {}
        for name, value in g.items():
            u = state.u.get(name, torch.zeros_like(value))
            if value.dim() < 2:
                sent[name] = state.u[name] = self.momentum * u + value
                places[name] = torch.arange(value.numel())
            else:
                v, k = state.v.get(name, torch.zeros_like(value)), math.ceil(density * value.numel())
                places[name], sent[name], state.u[name], state.v[name] = remember(u, v, value, self.momentum, k)
        return Sparse(TopK.of(sent, places), buffers)


def remember(u: Tensor, v: Tensor, g: Tensor, momentum: float, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """After a change g: where the k values to be sent stand, the v they are of, and u and v without them."""
    u = momentum * u + g
    v = v + u
    places = largest(v, k)
    rest = [x.reshape(-1).index_fill(0, places, 0).view(x.shape) for x in (u, v)]
    return places, v, rest[0], rest[1]


def clipped(g: State, norm: float) -> State:
    """All tensors scaled together so that their norm, as one vector, is at most `norm`."""
    total = math.sqrt(sum(float(value.square().sum(dtype=torch.float64)) for value in g.values()))
    return {name: value * (norm / total) for name, value in g.items()} if total > norm else g
