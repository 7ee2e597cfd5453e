"""FedLP: Zhu, Shi, Luo, Wang, Peng, Fan, Letaief, "FedLP: Layer-Wise Pruning Mechanism for Communication-Computation
Efficient Federated Learning", ICC 2023, homogeneous scheme.

Every client of a cohort trains the whole model and keeps each of its entries with probability 1 - ratio, independently
by client, entry and round; only what is kept is sent. The server takes the plain mean of each entry over the clients
that sent it; an entry nobody sent stays as it was. With clusters=4 and fraction=0.2 it runs inside clusters
(`clustered`), as GENE-FL runs it.

Bytes per client, before lossless coding: in a round 4 D down and, on average, 4 (1 - ratio) D up, where D counts the
model's values (with batch-norm buffers); a newcomer gets 4 D once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewbytes.base.state import State
from fewbytes.core.ranges import BelowOne, Count, Share
from fewbytes.core.site import Site
from fewbytes.methods.clustered import Clustered


@dataclass(frozen=True)
class FedLP(Clustered):
    """Hyper-parameters of FedLP."""

    clusters: Count = 1
    fraction: Share = 1.0
    ratio: BelowOne = 0.5  # part of the entries that is left out

    headline: ClassVar[str] = "global"
    weighted: ClassVar[bool] = False

    def observed(self, model: nn.Module) -> None:
        """A random part of the entries, another one each round."""

    def uploaded(self, received: State, site: Site) -> list[str]:
        return [name for name in received if site.rng.random() >= self.ratio]
