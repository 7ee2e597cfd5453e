"""Ensemble: one-shot learning that keeps every client's model; the upper bound of FuseFL's and DENSE's tables.

Every client trains the same first model on its own data and uploads it once, batch-norm statistics included. The server
keeps all M models and predicts with the unweighted mean of their logits, F(x) = (1/M) sum_m f_m(x). Nothing is sent to
the clients, and M models must be stored and evaluated.

Bytes per client, in its one round, before lossless coding: nothing down (the first model is drawn from the seed), 4 D
up, where D counts the model's values with batch-norm buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch import nn

from fewbytes.core.problem import Problem
from fewbytes.methods.parts.one_shot import OneShot, Uploads, ensemble, shorter


@dataclass(frozen=True)
class Ensemble(OneShot):
    """Hyper-parameters of the local training."""

    def quick(self, epochs: int) -> Self:
        return replace(self, local=shorter(self.local, epochs))

    def global_model(self, state: Uploads, problem: Problem) -> nn.Module | None:
        return ensemble(state.models, problem) if state.models else None
