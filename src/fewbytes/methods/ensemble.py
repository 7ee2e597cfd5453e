"""Ensemble: one-shot learning that keeps every client's model; the upper bound of FuseFL's and DENSE's tables.

Every client trains the same first model on its own data until it is done and uploads it once, batch-norm statistics
included. The server keeps all M models; for a sample it answers with the mean of their logits,
F(x) = (1/M) sum_m f_m(x), with equal weights. Nothing is sent to the clients, and M models must be kept and evaluated.

Bytes per client, in its one round, before lossless coding: nothing down (the first model is drawn from the seed), 4 D
up, where D counts the model's values with batch-norm buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import nn

from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.objective import Classification, Objective
from fewbytes.core.problem import Problem
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.one_shot import LONG, Trained, Uploads, ensemble, shorter, train_once


@dataclass(frozen=True)
class Ensemble(Method):
    """Hyper-parameters of the local training."""

    local: Local = LONG

    headline: ClassVar[str] = "global"
    needs: ClassVar[type[Objective]] = Classification

    def quick(self, epochs: int) -> Self:
        return replace(self, local=shorter(self.local, epochs))

    def server(self, problem: Problem) -> Uploads:
        return Uploads()

    def planned_rounds(self, asked: int) -> int:
        return 1

    def round(self, state: Uploads, net: Network, t: int) -> None:
        state.models = {m: reply.theta.dense() for m, reply in net.call(self.train, to=net.clients)}

    def train(self, state: None, message: None, site: Site) -> Trained:
        return train_once(site, self.local)

    def global_model(self, state: Uploads, problem: Problem) -> nn.Module | None:
        return ensemble(state.models, problem) if state.models else None
