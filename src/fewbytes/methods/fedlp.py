"""FedLP: Zhu, Shi, Luo, Wang, Peng, Fan, Letaief, "FedLP: Layer-Wise Pruning Mechanism for Communication-Computation
Efficient Federated Learning", ICC 2023, homogeneous scheme.

Every sampled client trains the whole model and keeps each of its entries with probability 1 - ratio, independently
by client, entry and round; it sends only the kept ones. The server takes the plain mean of each entry over the clients
that sent it; an entry that no client sent stays unchanged.

Bytes per client and round, before lossless coding: 4 D down and, on average, 4 (1 - ratio) D up, where D counts the
model's values (with batch-norm buffers).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from torch import nn

from fewbytes.base.errors import MethodError
from fewbytes.base.ranges import PART, BelowOne, Share
from fewbytes.base.state import trained_entries
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import ENTRY_RULES
from fewbytes.core.site import Site, handler_stream
from fewbytes.core.training import Local
from fewbytes.methods.parts import averaging
from fewbytes.methods.parts.averaging import GlobalModel, Model, Own
from fewbytes.wire import Dense, payload


@payload
class Kept:
    """Client to server: the kept entries of its model."""

    theta: Annotated[Dense, PART]


@dataclass(frozen=True)
class FedLP(Method):
    """Hyper-parameters of FedLP; local training's are GENE-FL's."""

    fraction: Share = 1.0
    local: Local = Local(epochs=10, lr=0.01, batch=64, momentum=0.9)
    ratio: BelowOne = 0.5  # fraction of the entries that are not sent

    promises = Promises(sends="some of its layers, drawn at random", aggregates=ENTRY_RULES)

    def server(self, problem: Problem) -> GlobalModel:
        return averaging.first_shared(problem, trained_entries(problem.first_model()))

    def client(self, site: Site) -> Own:
        return Own({})

    def round(self, state: GlobalModel, net: Network, t: int) -> None:
        means, seed = net.entry_means(state.theta), net.problem.seed

        def check(client: Id, reply: Kept) -> None:
            if reply.theta.state.keys() != self.drawn(state.theta, handler_stream(seed, client, t, "train")):
                raise MethodError("its upload has other entries than those it drew")

        send = Model(Dense(state.theta))
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=send, check=check):
            means.add(reply.theta.dense())
        state.theta = means.over(state.theta)

    def train(self, state: Own, message: Model, site: Site) -> Kept:
        trained = averaging.train_shared(state, message, site, self.local)
        kept = self.drawn(trained.theta.dense(), site.rng)
        return Kept(Dense({name: value for name, value in trained.theta.dense().items() if name in kept}))

    def drawn(self, names: Iterable[str], rng: np.random.Generator) -> set[str]:
        """The kept entries, drawn from the names in their order."""
        return {name for name in names if rng.random() >= self.ratio}

    def global_model(self, state: GlobalModel, problem: Problem) -> nn.Module | None:
        return averaging.whole_model(state, problem)

    def local_model(self, state: Own, site: Site) -> nn.Module | None:
        return averaging.own_model(state, site)
