"""FedBN: Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
ICLR 2021.

Batch normalisation, its parameters as well as its statistics, stays with each client, whose features may be
distributed differently; everything else is averaged as in FedAvg. All clients take part in every round. With clusters=4
and fraction=0.2 it runs inside clusters (`clustered`), as GENE-FL runs it.

Bytes per client, before lossless coding: in a round 4 D down and 4 D up, where D counts the model's values without
batch normalisation; a newcomer gets 4 D once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewbytes.base.state import trained_entries
from fewbytes.core.ranges import BelowOne, Count, Share
from fewbytes.methods.clustered import Clustered


@dataclass(frozen=True)
class FedBN(Clustered):
    """Hyper-parameters of local training, with the values of the authors' code, and of clusters to run it inside of."""

    clusters: Count = 1
    fraction: Share = 1.0
    epochs: Count = 1  # E
    batch: Count = 32
    momentum: BelowOne = 0.0

    headline: ClassVar[str] = "personalised"

    def shared(self, model: nn.Module) -> list[str]:
        return without_batch_norm(model)


def without_batch_norm(model: nn.Module) -> list[str]:
    """Names of the model's entries, parameters and buffers, that are not of a batch normalisation."""
    own = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name in module.state_dict()
    }
    return [name for name in trained_entries(model) if name not in own]
