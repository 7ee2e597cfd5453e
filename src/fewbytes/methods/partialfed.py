"""PartialFed-Fix: Sun, Huo, Yang, Bai, "PartialFed: Cross-Domain Personalized Federated Learning via Partial
Initialization", NeurIPS 2021.

A fixed part of the layers is loaded from the server's model before every local training; the others keep the client's
own last values. Clients train all layers and send the fixed part, which the server averages as FedAvg does. The part is
the one that GENE-FL's figures give away: the last square convolution of each width. With clusters=4 and fraction=0.2 it
runs inside clusters (`clustered`), as GENE-FL runs it.

Bytes per client, before lossless coding: in a round 4 A down and 4 A up, where A counts the values of that part; a
newcomer gets 4 A once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewbytes.core.ranges import Count, Share
from fewbytes.methods.clustered import Clustered
from fewbytes.models.layers import layers_of, square_layers


@dataclass(frozen=True)
class PartialFed(Clustered):
    """Hyper-parameters of local training, and of clusters to run it inside of."""

    clusters: Count = 1
    fraction: Share = 1.0

    headline: ClassVar[str] = "personalised"

    def shared(self, model: nn.Module) -> list[str]:
        last = {layers[-1] for layers in square_layers(model).values()}
        return [name for layer, names in layers_of(model).items() if layer in last for name in names]
