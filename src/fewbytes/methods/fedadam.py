"""FedAdam: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization", ICLR
2021, Algorithm 2.

Clients train as in FedAvg; the server uses the mean D of their changes of the model, weighted by their numbers of
samples, as a gradient for Adam: m <- beta1 m + (1 - beta1) D; v <- beta2 v + (1 - beta2) D^2; x <- x + eta m /
(sqrt(v) + tau), without bias correction. Batch-norm statistics are averaged as they are.

Bytes per client and round, before lossless coding: 4 D down, 4 D up, where D counts the model's values (with
batch-norm buffers).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fewbytes.methods.parts.adaptive import Adaptive


@dataclass(frozen=True)
class FedAdam(Adaptive):
    """Hyper-parameters of FedAdam: those of Algorithm 2."""

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * delta.square()
