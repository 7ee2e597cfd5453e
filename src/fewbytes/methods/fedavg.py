"""FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, Algorithm 1.

Each round the server sends its model to a random cohort; every client of it trains the model on its own data for a few
local epochs; the server takes the mean of what comes back, weighted by the clients' numbers of samples:
w_{t+1} = sum_k (n_k / n) w_{t+1}^k.

Bytes per client and round, before lossless coding: 4 D down, 4 D up, where D counts the model's values (with
batch-norm buffers when they are averaged too).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from fewbytes.base.state import Mean, State, state_of, trained_entries, trained_parameters
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Task
from fewbytes.core.ranges import BelowOne, Count, NotNegative, Positive, Share, Whole
from fewbytes.core.site import Site
from fewbytes.core.training import Loss, annealed
from fewbytes.wire import Dense, payload


@payload
class Model:
    """Server to client: w_t."""

    theta: Dense


@payload
class Trained:
    """Client to server: w_{t+1}^k and n_k."""

    theta: Dense
    samples: int


@dataclass
class Global:
    """The server's state."""

    theta: State  # w_t


@dataclass
class Own:
    """A client's state."""

    theta: State  # what of its model it keeps from round to round: its batch-norm statistics, if they stay local


@dataclass(frozen=True)
class FedAvg(Method):
    """Hyper-parameters of FedAvg."""

    fraction: Share = 1.0  # C, the part of the clients that takes part in a round
    epochs: Count = 1  # E
    lr: Positive = 0.01  # eta
    batch: Count = 10  # B
    momentum: BelowOne = 0.0
    weight_decay: NotNegative = 0.0
    lr_rounds: Whole = 0  # lr falls to 0 by a cosine over so many rounds; 0: it stays
    buffers: Literal["averaged", "local"] = "averaged"  # batch-norm statistics; local: never sent (FedPURIN's tables)

    headline: ClassVar[str] = "global"

    def server(self, task: Task) -> Global:
        shared = set(self.shared(task.first_model()))
        return Global({name: v.clone() for name, v in task.first_state().items() if name in shared})

    def shared(self, model: nn.Module) -> list[str]:
        """Names of the model's entries that travel."""
        return list(trained_entries(model) if self.buffers == "averaged" else trained_parameters(model))

    def client(self, site: Site) -> Own | None:
        return Own({}) if self.buffers == "local" else None

    def round(self, state: Global, net: Network, t: int) -> None:
        mean = Mean()
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=Model(Dense(state.theta))):
            mean.add(reply.theta.dense(), weight=reply.samples)
        state.theta = mean()

    def train(self, state: Own | None, message: Model, site: Site) -> Trained:
        model = site.model(message.theta.dense() | (state.theta if state else {}))
        self.train_on(site, model)
        site.score("personalised", model)
        sent = state_of(model, keep=message.theta.dense().__contains__)
        if state is not None:
            state.theta = state_of(model, keep=lambda name: name not in sent)
        return Trained(Dense(sent), len(site.train))

    def train_on(self, site: Site, model: nn.Module, loss: Loss | None = None) -> None:
        """Train by the settings of local training."""
        site.fit(
            model, epochs=self.epochs, lr=annealed(self.lr, site.round, self.lr_rounds), batch=self.batch,
            momentum=self.momentum, weight_decay=self.weight_decay, loss=loss,
        )  # fmt: skip

    def global_model(self, state: Global, task: Task) -> nn.Module | None:
        model = task.first_model(state.theta)
        return model if state.theta.keys() == trained_entries(model).keys() else None

    def observed(self, model: nn.Module) -> list[str]:
        shared = set(self.shared(model))
        return [name for name, p in model.named_parameters() if name in shared and p.requires_grad]
