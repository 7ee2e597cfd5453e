"""FedFina: the last convolutions only; a baseline of GENE-FL (Section IV-A).

As PartialFed, with another part: the last four convolutions that are larger than 1 x 1. They are loaded from the
server's model before every local training, trained with the rest, sent and averaged; all else is each client's own.
With clusters=4 and fraction=0.2 it runs inside clusters (`clustered`), as GENE-FL runs it.

Bytes per client, before lossless coding: in a round 4 A down and 4 A up, where A counts the values of those
convolutions; a newcomer gets 4 A once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewbytes.core.ranges import Count, Share
from fewbytes.methods.clustered import Clustered
from fewbytes.models.layers import hidden_layers, layers_of


@dataclass(frozen=True)
class FedFina(Clustered):
    """Hyper-parameters of FedFina."""

    clusters: Count = 1
    fraction: Share = 1.0
    convolutions: Count = 4  # how many of the last

    headline: ClassVar[str] = "personalised"

    def shared(self, model: nn.Module) -> list[str]:
        last = hidden_layers(model)[-self.convolutions :]
        return [name for layer, names in layers_of(model).items() if layer in last for name in names]
