"""FedFina: the last convolutions only; a baseline of GENE-FL (Section IV-A), inside its clusters.

As PartialFed, with another part: the last four convolutions that are larger than 1 x 1. They are loaded from the
server's model before every local training, trained with the rest, sent and averaged; all else is each client's own.

Bytes per client, before lossless coding: once 4 f d up; in a round 4 A down and 4 A up, where A counts the values of
those convolutions; a newcomer gets 4 A once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fewbytes.methods.clustered import Clustered
from fewbytes.models.layers import hidden_layers, layers_of
from fewbytes.ranges import Count


@dataclass(frozen=True)
class FedFina(Clustered):
    """Hyper-parameters of FedFina."""

    convolutions: Count = 4  # how many of the last

    def shared(self, model: nn.Module) -> list[str]:
        last = hidden_layers(model)[-self.convolutions :]
        return [name for layer, names in layers_of(model).items() if layer in last for name in names]
