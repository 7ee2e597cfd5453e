"""Several models that answer as one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class LogitMean(nn.Module):
    """The mean of its members' logits, with equal weights; members may differ but for their input and classes."""

    def __init__(self, members: Iterable[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def each(self, x: Tensor) -> Tensor:
        """Every member's logits, (members, n, classes)."""
        return torch.stack([member(x) for member in self.members])

    def forward(self, x: Tensor) -> Tensor:
        return self.each(x).mean(0)
