"""FedBuff: Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, "Federated Learning with Buffered Asynchronous
Aggregation", AISTATS 2022, Algorithms 1 and 2.

The server keeps M_c clients training. When a client has sent its change Delta_i of the model it received, another one
starts. After K changes the server updates w <- w + eta_g / K sum_i s(tau_i) Delta_i, which is a round. tau_i is the
number of updates since client i started, and s(tau) = (1 + tau)^-a. Batch-norm statistics are averaged without s.

Bytes per client and exchange, before lossless coding: 4 D down, 4 D up, where D counts the model's values (with
batch-norm buffers). Clients still training when the last round ends have received the model, and send nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Self

from torch import nn

from fewbytes.base.ranges import LEARNT, SENT, STATISTICS, Count, NotNegative, Positive
from fewbytes.base.state import State
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import compressed
from fewbytes.methods.parts.averaging import Model
from fewbytes.methods.parts.compressed import ServerModel
from fewbytes.wire import Dense, payload


@payload
class Update:
    """Client to server: Delta_i, and the batch-norm statistics."""

    change: Annotated[Dense, SENT, LEARNT]
    buffers: Annotated[Dense, SENT, STATISTICS]


@dataclass(frozen=True)
class FedBuff(Method):
    """Hyper-parameters of FedBuff."""

    concurrency: Count = 10  # M_c, number of clients that train at the same time
    buffer: Count = 10  # K, number of changes per server step
    local: Local = Local(epochs=1, lr=0.01, batch=10)  # eta_l
    server_lr: Positive = 1.0  # eta_g
    discount: NotNegative = 0.5  # a; 0: stale changes count fully

    promises = Promises(sends="its change of the model, when it has finished", streams=True, aggregates=EVERY_RULE)

    def quick(self, epochs: int) -> Self:
        return replace(super().quick(epochs), buffer=min(self.buffer, 5))  # suits ten clients, the default

    def cohort(self, clients: int) -> int:
        return min(self.buffer, clients)

    def server(self, problem: Problem) -> ServerModel:
        return compressed.first_server_model(problem)

    def round(self, state: ServerModel, net: Network, t: int) -> None:
        if self.buffer >= len(net.clients):
            net.note("every round waits for the slowest client: lower buffer", f"{self.buffer} of {len(net.clients)}")
        mean, model = net.mean(state.buffers), compressed.message(state)
        for _, reply, staleness in islice(net.stream(self.train, model, at_once=self.concurrency), self.buffer):
            mean.add(weighted(reply.change.dense(), staleness, self.discount) | reply.buffers.dense())
        taken = mean()
        state.buffers = {name: taken[name] for name in state.buffers}
        change = {name: self.server_lr * value for name, value in taken.items() if name in state.theta}
        state.theta = compressed.moved(state.theta, change)

    def train(self, state: None, message: Model, site: Site) -> Update:
        change, buffers = compressed.trained_change(message, site, self.local)
        return Update(Dense(change), buffers)

    def global_model(self, state: ServerModel, problem: Problem) -> nn.Module:
        return compressed.whole(state, problem)

    def observed(self, model: nn.Module) -> list[str]:
        return [name for name, p in model.named_parameters() if p.requires_grad]


def weighted(change: State, staleness: int, a: float) -> State:
    """s(tau) Delta_i with s(tau) = (1 + tau)^-a: a change discounted by its staleness."""
    return {name: value * (1 + staleness) ** -a for name, value in change.items()}
