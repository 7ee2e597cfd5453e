"""DGC: Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
Training", ICLR 2018, Algorithm 4, with a client's change per round instead of a gradient.

For each tensor, every client keeps a momentum u and the unsent change v. Local training (without momentum) changes the
model by g; then u <- m u + g, v <- v + u. The client sends the fraction `density` of v that is largest in magnitude,
and sets u and v to zero at these places (momentum factor masking). g may be clipped first. Biases and other vectors are
sent whole, as their u. The server adds the plain mean of the uploads; batch-norm statistics are averaged uncompressed.

Bytes per client and round, before lossless coding: 4 D down; 7 (k + b) + 4 s up (a value and 24 bits for its index),
where the model's D values are s batch-norm statistics, b of vectors and d others; k = density d, rounded up in each
tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor, nn

from fewbytes.base.errors import MethodError
from fewbytes.base.ranges import EXACT, LEARNT, SENT, STATISTICS, NotNegative, Share, Whole
from fewbytes.base.state import State
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import VECTOR_RULES
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import compressed
from fewbytes.methods.parts.averaging import Model
from fewbytes.methods.parts.compressed import ServerModel
from fewbytes.wire import Dense, TopK, payload
from fewbytes.wire.topk import largest


@payload
class Sparse:
    """Client to server: the largest values of v, the vectors' u, and the batch-norm statistics."""

    change: Annotated[TopK, SENT, LEARNT]
    buffers: Annotated[Dense, SENT, STATISTICS, EXACT]


@dataclass
class Memory:
    """A client's state."""

    u: State  # momentum
    v: State  # the unsent change, of all tensors except vectors


@dataclass(frozen=True)
class DGC(Method):
    """Hyper-parameters of DGC."""

    fraction: Share = 1.0
    local: Local = Local(epochs=1, lr=0.01, batch=10, momentum=0.9)  # momentum: m, of the sent values
    density: Share = 1 / 32  # fraction of each tensor's values that is sent; the paper uses 0.001
    warmup: Whole = 0  # warm-up rounds, with density^(t / (warmup + 1)) in round t; the paper uses 4
    norm: NotNegative = 0.0  # clipping norm of a round's summed gradients, times sqrt(n); 0: no clipping

    promises = Promises(sends="the largest 1/32 of its change", aggregates=VECTOR_RULES, protects={"clients"})

    def server(self, problem: Problem) -> ServerModel:
        return compressed.first_server_model(problem)

    def client(self, site: Site) -> Memory:
        return Memory({}, {})

    def round(self, state: ServerModel, net: Network, t: int) -> None:
        def check(client: Id, reply: Sparse) -> None:
            for name, values in reply.change.values.items():
                if values.numel() > self.sent(state.theta[name], t):
                    raise MethodError(f"it sent {values.numel()} values of {name!r}, more than its density")

        replies = net.call(self.train, to=net.sample(self.fraction), send=compressed.message(state), check=check)
        state.theta = compressed.moved(state.theta, compressed.take_means(state, replies, net))

    def sent(self, value: Tensor, t: int) -> int:
        """The number of values of a tensor to send in round t."""
        density = self.density ** (min(t, self.warmup + 1) / (self.warmup + 1))
        return value.numel() if value.dim() < 2 else math.ceil(density * value.numel())

    def train(self, state: Memory, message: Model, site: Site) -> Sparse:
        m = self.local.momentum
        g, buffers = compressed.trained_change(message, site, replace(self.local, momentum=0.0))
        if self.norm:
            clients = self.fraction * len(site.problem.clients)
            g = clipped(g, self.norm * self.local.lr_in(site.round) / math.sqrt(clients))
        sent, places = {}, {}
        for name, value in g.items():
            u = state.u.get(name, torch.zeros_like(value))
            if value.dim() < 2:
                sent[name] = state.u[name] = m * u + value
                places[name] = torch.arange(value.numel())
            else:
                v, k = state.v.get(name, torch.zeros_like(value)), self.sent(value, site.round)
                places[name], sent[name], state.u[name], state.v[name] = remember(u, v, value, m, k)
        return Sparse(TopK.of(sent, places), buffers)

    def global_model(self, state: ServerModel, problem: Problem) -> nn.Module:
        return compressed.whole(state, problem)


def remember(u: Tensor, v: Tensor, g: Tensor, momentum: float, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """After a change g: the places of the k values to send, the v they come from, and u and v without them."""
    u = momentum * u + g
    v = v + u
    places = largest(v, k)
    rest = [x.reshape(-1).index_fill(0, places, 0).view(x.shape) for x in (u, v)]
    return places, v, rest[0], rest[1]


def clipped(g: State, norm: float) -> State:
    """All tensors scaled together so that their norm, as one vector, is at most `norm`."""
    total = math.sqrt(sum(float(value.square().sum(dtype=torch.float64)) for value in g.values()))
    return {name: value * (norm / total) for name, value in g.items()} if total > norm else g
